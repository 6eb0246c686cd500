"""The machine that runs torch's tests: it finds them, moves them, and tells a surprise when it sees one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.conformance.expectations import Expectations, parse_expectations
from tests.conformance.moved import FAKE_CUDA, MOVE, move_to_cpu
from tests.conformance.runner import Outcome, Runner
from tests.conformance.source import Case, list_cases
from tests.conformance.suites import DDP, DIST_AUTOGRAD, RPC, ShippedTests, Suite

pytestmark = pytest.mark.full

EXAMPLES = replace(
    DDP,
    name="examples",
    classes=(
        ShippedTests("tests.conformance.examples", "Outer.Examples", ("tests.conformance.examples:Fixture",)),
    ),
)
RPC_EXAMPLES = replace(
    RPC,
    name="rpc_examples",
    classes=(
        ShippedTests(
            "tests.conformance.rpc_examples", "Examples", ("tests.conformance.rpc_examples:Fixture",)
        ),
    ),
)
_AUTOGRAD_EXAMPLES = "tests.conformance.autograd_examples"
AUTOGRAD_EXAMPLES = replace(
    DIST_AUTOGRAD,
    name="autograd_examples",
    classes=(
        ShippedTests(_AUTOGRAD_EXAMPLES, "Examples", (f"{_AUTOGRAD_EXAMPLES}:Fixture",)),
        ShippedTests(_AUTOGRAD_EXAMPLES, "MoreExamples", (f"{_AUTOGRAD_EXAMPLES}:Fixture",)),
    ),
)
# An RPC that stays at home: what such an implementation passes proves nothing.
AT_HOME = replace(
    RPC_EXAMPLES, names={**RPC.names, "weft.rpc:rpc_sync": "tests.conformance.at_home:call_here"}
)
BACKWARD_AT_HOME = replace(
    AUTOGRAD_EXAMPLES,
    names={
        **DIST_AUTOGRAD.names,
        "weft.dist_autograd:backward": "tests.conformance.at_home:backward_here",
    },
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(EXAMPLES) as made:
        yield made


@pytest.fixture(scope="module")
def rpc_runner() -> Iterator[Runner]:
    with Runner(RPC_EXAMPLES) as made:
        yield made


def example(name: str, suite: Suite = EXAMPLES) -> Case:
    return next(case for case in list_cases(suite) if case.name == name)


def test_tests_that_reach_a_replaced_name_are_found() -> None:
    found = {case.name: case.num_ranks for case in list_cases(EXAMPLES)}
    assert "test_names_are_replaced" in found  # through a function
    assert "test_does_not_concern_weft" not in found  # a variable of that name
    assert found["test_has_three_ranks"] == 3
    assert found["test_fails"] == 2


@pytest.mark.parametrize(
    "name",
    [
        "test_names_are_replaced",
        "test_runs_on_the_cpu",
        "test_leaves_traces",
        "test_finds_no_traces",
    ],
)
def test_an_example_passes(name: str, runner: Runner) -> None:
    outcome = runner.run(example(name))
    assert outcome.status == "passes", outcome.report


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("test_fails", "fails", "one is a class"),
        ("test_is_skipped", "skipped", "not with gloo"),
        ("test_leaves_by_an_exit_code", "skipped", "odd world size"),
        ("test_takes_torchs_engine", "fails", "TorchEngineUsed: torch.distributed:Reducer was used"),
    ],
)
def test_an_example_does_not_pass(name: str, status: str, error: str, runner: Runner) -> None:
    outcome = runner.run(example(name))
    assert outcome.status == status, outcome.report
    assert error in outcome.error


def test_a_crash_and_a_hang_cost_only_themselves(runner: Runner) -> None:
    died = runner.run(example("test_dies"))
    assert died.status == "fails"
    hung = runner.run(example("test_hangs"), timeout_secs=0.5)
    assert hung.error == "hangs: not done in 0.5 s"
    assert runner.run(example("test_names_are_replaced")).status == "passes"


@pytest.mark.parametrize(
    "name",
    [
        "test_names_are_replaced",
        "test_calls_leave_the_caller",
        "test_methods_of_the_test_are_sent",
        "test_leaves_an_agent_and_globals",
        "test_finds_neither",
    ],
)
def test_an_rpc_example_passes(name: str, rpc_runner: Runner) -> None:
    outcome = rpc_runner.run(example(name, RPC_EXAMPLES))
    assert outcome.status == "passes", outcome.report


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("test_fails_while_another_waits", "fails", "the other one"),
        ("test_uses_a_name_that_weft_lacks", "fails", "weft has no torch.distributed.rpc:_server_process"),
        ("test_takes_torchs_engine", "fails", "TorchEngineUsed: torch._C._distributed_rpc:TensorPipeAgent"),
        ("test_needs_gpus", "unable", "GPUs needed: 64"),
    ],
)
def test_an_rpc_example_does_not_pass(name: str, status: str, error: str, rpc_runner: Runner) -> None:
    outcome = rpc_runner.run(example(name, RPC_EXAMPLES))
    assert outcome.status == status, outcome.report
    assert error in outcome.error


def test_a_call_that_never_leaves_the_caller_is_caught() -> None:
    with Runner(AT_HOME) as runner:
        outcome = runner.run(example("test_calls_leave_the_caller", AT_HOME))
    assert outcome.status == "fails"
    assert "in test_calls_leave_the_caller" in outcome.report
    assert outcome.error.endswith("raised AssertionError")


@pytest.fixture(scope="module")
def autograd_runner() -> Iterator[Runner]:
    with Runner(AUTOGRAD_EXAMPLES) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    ["test_names_are_replaced", "test_gradients_come_from_the_other_rank", "test_leaves_by_an_exit_code"],
)
def test_an_autograd_example_passes(name: str, autograd_runner: Runner) -> None:
    outcome = autograd_runner.run(example(name, AUTOGRAD_EXAMPLES))
    assert outcome.status == "passes", outcome.report


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("test_takes_torchs_engine", "fails", "TorchEngineUsed: torch._C._distributed_autograd:_new_context"),
        ("test_takes_torchs_optimizer", "fails", "TorchEngineUsed: torch.distributed.optim.optimizer"),
        ("MoreExamples.test_names_are_replaced", "fails", "the other one of this name passes"),
        ("test_needs_gpus", "unable", "GPUs needed: 64"),
    ],
)
def test_an_autograd_example_does_not_pass(
    name: str, status: str, error: str, autograd_runner: Runner
) -> None:
    outcome = autograd_runner.run(example(name, AUTOGRAD_EXAMPLES))
    assert outcome.status == status, outcome.report
    assert error in outcome.error


def test_a_backward_that_never_leaves_the_caller_is_caught() -> None:
    with Runner(BACKWARD_AT_HOME) as runner:
        outcome = runner.run(example("test_gradients_come_from_the_other_rank", BACKWARD_AT_HOME))
    assert outcome.status == "fails"
    assert "in backward_here" in outcome.report
    assert "dist_autograd.backward" in outcome.error


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("x.cuda(rank)", "x.cpu()"),
        ("torch.cuda.set_device(1)", f"{FAKE_CUDA}.set_device(1)"),
        ("x.to(rank)", f"x.to({MOVE}(rank))"),
        ("torch.ones(2, device=rank)", f"torch.ones(2, device={MOVE}(rank))"),
        ("torch.device(f'cuda:{rank}')", f"torch.device({MOVE}(f'cuda:{{rank}}'))"),
        ("f(x, device_ids=[0], output_device=1)", "f(x, device_ids=None, output_device=None)"),
        ("mesh('cuda', backend='nccl')", "mesh('cpu', backend='gloo')"),
        ("backend == 'nccl'", "backend == 'nccl'"),
        ("data['cuda']", "data['cuda']"),
        ("@skip_if_no_gpu\n@keep\ndef f():\n    pass", "@keep\ndef f():\n    pass"),
        ("@unittest.skipIf(IS_LINUX, 'url')\ndef f():\n    pass", "def f():\n    pass"),
        (
            "@skipIf(BACKEND == 'x', 'y')\ndef f():\n    pass",
            "@skipIf(BACKEND == 'x', 'y')\ndef f():\n    pass",
        ),
    ],
)
def test_code_is_moved_to_the_cpu(text: str, moved: str) -> None:
    assert ast.unparse(move_to_cpu(ast.parse(text))) == moved


def listed() -> Expectations:
    return parse_expectations(
        """
        torch = "2.13"
        [[fails]]
        reason = "private"
        error = "no attribute"
        tests = ["test_a"]
        [[fails]]
        reason = "waits for what never comes"
        error = "hangs"
        tests = ["test_d"]
        secs = 5
        [[slow]]
        reason = "sleeps"
        tests = ["test_e"]
        [[skipped]]
        reason = "not here"
        tests = ["test_b"]
        """
    )


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("test_a", Outcome("fails", error="AttributeError: no attribute 'x'")),
        ("test_b", Outcome("skipped")),
        ("test_c", Outcome("passes")),
    ],
)
def test_what_is_listed_is_no_surprise(test: str, outcome: Outcome) -> None:
    assert listed().surprise(test, outcome) is None


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("test_a", Outcome("passes")),
        ("test_a", Outcome("fails", error="ValueError: another reason")),
        ("test_b", Outcome("passes")),
        ("test_c", Outcome("fails")),
        ("test_c", Outcome("skipped")),
    ],
)
def test_anything_else_is_a_surprise(test: str, outcome: Outcome) -> None:
    assert test in (listed().surprise(test, outcome) or "")


def test_a_list_says_how_long_a_test_may_take() -> None:
    found = listed()
    assert [found.limit_secs(test) for test in ("test_a", "test_c", "test_d", "test_e")] == [60, 60, 5, 1800]


@pytest.mark.parametrize(
    "entries",
    [
        "[[fails]]\nreason = ''\nerror = 'x'\ntests = ['test_a']",
        "[[fails]]\nreason = 'x'\nerror = ''\ntests = ['test_a']",
        "[[fails]]\nreason = 'x'\nerror = 'x'\ntests = []",
        "[[skipped]]\nreason = 'x'\ntests = ['test_a', 'test_a']",
    ],
)
def test_a_careless_list_is_refused(entries: str) -> None:
    with pytest.raises(ValueError, match=r"without reason|more than once"):
        parse_expectations(f"torch = '2.13'\n{entries}")
