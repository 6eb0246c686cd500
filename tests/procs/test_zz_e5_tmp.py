import pytest
from tests.tp_bodies import zz_fake_streams as z
from weft.testing.pool import shared_pool
@pytest.mark.parametrize("ranks",[1,2])
@pytest.mark.parametrize("name",["overlap","late","on_a_side_stream","accumulated_for_another_stream","branches_on_two_streams"])
def test_s(name,ranks):
    if (name,ranks)==("late",1): return
    shared_pool(ranks).run(z.run, args=(name,), backend="weft", timeout=90, collective_timeout=20)
