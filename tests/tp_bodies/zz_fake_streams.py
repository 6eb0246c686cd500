"""on_gpu_streams on the CPU, with torch.cuda's streams as dummies: shows errors of logic and of names only."""
import contextlib
from unittest import mock
import torch
from tests.fsdp_bodies import late_collectives as lc
from tests.tp_bodies import on_gpu_streams as s, on_gpu
class Dummy:
    def wait_stream(self,*a):pass
    def wait_event(self,*a):pass
    def record_event(self):return self
def run(name):
    real_full, real_zeros = torch.full, torch.zeros
    cpu=lambda f: (lambda *a, **k: f(*a, **{**k, "device":"cpu"} if k.get("device")=="cuda" else k))
    with contextlib.ExitStack() as st:
        e=st.enter_context
        e(mock.patch.object(torch.cuda,"_sleep",lambda *a:None,create=True))
        e(mock.patch.object(torch.cuda,"Stream",Dummy)); e(mock.patch.object(torch.cuda,"current_stream",Dummy))
        e(mock.patch.object(torch.cuda,"stream",lambda *_:contextlib.nullcontext())); e(mock.patch.object(torch.cuda,"synchronize",lambda:None))
        e(mock.patch.object(torch.Tensor,"cuda",lambda self:self)); e(mock.patch.object(torch.nn.Module,"cuda",lambda self:self))
        e(mock.patch.object(torch.Tensor,"record_stream",lambda self,_:None))
        e(mock.patch.object(torch,"full",cpu(real_full))); e(mock.patch.object(torch,"zeros",cpu(real_zeros)))
        e(mock.patch.object(s,"mesh_on",lambda _:on_gpu.mesh_on("cpu")))
        getattr(s,name)()
