"""The ops by which a compiled graph and the owner of its gradients speak to each other.

`mark_gradient` is in the backward of every parameter of a compiled replicated module. It changes nothing: it
tells the passes which gradient this is. Where they reduce it in the graph, `begin_reduction` and
`end_reduction` tell its owner so when the graph runs. Where they don't (another backend, a graph that holds
a part of the module only) the owner reduces them when autograd hands them over, as without a compiler. So a
gradient can't be left out by mistake.

`reduce_gradient` is in a backward that compiled autograd has traced. There is nobody behind it: it reduces.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from weft.autograd import traced_inside_only
from weft.compiler.schedule import Bucket, decode_schedule
from weft.errors import StateError


class GradientOwner(Protocol):
    """Who answers for the gradients of some parameters."""

    wire: str  # how they travel, encoded

    def parameters(self) -> Iterable[tuple[int, torch.Tensor]]:
        """The parameters, with the indices by which graphs name them."""
        ...

    def listen(self) -> None:
        """Be ready for a backward that compiled autograd traces."""
        ...

    def buckets(self) -> Sequence[Bucket]:
        """In which buckets graphs reduce them, in this order; none where they can't."""
        ...

    def begin(self, order: Sequence[int]) -> list[torch.Tensor]:
        """A graph reduces them now. The marks that go behind each bucket's gradients.

        `order` is the one in which the graph makes them.
        """
        ...

    def end(self, reduced: Sequence[torch.Tensor]) -> None:
        """A graph has reduced them: what became of the marks."""
        ...

    def open(self, order: Sequence[int]) -> None:
        """A graph reduces them now, in the owner's memory."""
        ...

    def place(self, bucket: int, at: int) -> tuple[torch.Tensor, float]:
        """Where a gradient of this bucket is to be made, and by what it is to be multiplied."""
        ...

    def send(self, bucket: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start to reduce this bucket, in the owner's memory and by its hook.

        What stands in the list for gradients that were made in their places is not read.
        """
        ...

    def receive(self) -> None:
        """Wait for all buckets that were sent."""
        ...

    def leave(self) -> None:
        """A graph makes some of them and doesn't reduce them."""
        ...

    def reduce_one(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """The mean of one of them, now."""
        ...


_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enlist(owner: GradientOwner) -> int:
    """Give an owner the number by which graphs call it. It is forgotten when it is dropped."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def live_owners() -> list[GradientOwner]:
    """All owners there are."""
    return list(_owners.values())


def owner_of(number: int) -> GradientOwner:
    """The owner with this number."""
    owner = _owners.get(number)
    if owner is None:
        raise StateError(
            "a compiled backward ran after the module that it was compiled for was dropped. Keep the module "
            "as long as its outputs."
        )
    return owner


_library = torch.library.Library("weft", "FRAGMENT")
_library.define("mark_gradient(Tensor gradient, int owner, int index, str wire) -> Tensor")
_library.define("reduce_gradient(Tensor gradient, int owner, int index, str wire) -> Tensor")
_library.define("leave_gradients(Tensor(a!) gradient, int owner) -> ()")
_library.define(
    "send_bucket(Tensor[] gradients, Tensor? after, int owner, int bucket, str schedule) -> Tensor"
)
_library.define("open_buckets(int owner, str schedule) -> Tensor")
_library.define(
    "multiply_in_place(Tensor? plus, Tensor left, Tensor right, bool is_turned, "
    "Tensor after, int owner, int bucket, int at) -> Tensor"
)
_library.define(
    "add_rows_in_place(Tensor rows, Tensor values, Tensor? mask, bool is_first, "
    "Tensor after, int owner, int bucket, int at) -> Tensor"
)
_library.define("receive_buckets(Tensor(a!)[] buckets, int owner) -> ()")
_library.define("begin_reduction(int owner, str schedule) -> Tensor[]")
_library.define("end_reduction(Tensor(a!)[] marks, int owner) -> ()")


def _mark(gradient: torch.Tensor, owner: int, index: int, wire: str) -> torch.Tensor:
    owner_of(owner).leave()
    return gradient.clone()  # a view would be cheaper, but ops of a graph may not return what they got


def _reduce(gradient: torch.Tensor, owner: int, index: int, wire: str) -> torch.Tensor:
    return owner_of(owner).reduce_one(gradient, index)


def _leave(gradient: torch.Tensor, owner: int) -> None:
    owner_of(owner).leave()


def _begin(owner: int, schedule: str) -> list[torch.Tensor]:
    _, order = decode_schedule(schedule)
    return owner_of(owner).begin(order)


def _end(marks: Sequence[torch.Tensor], owner: int) -> None:
    owner_of(owner).end(marks)


def _send(
    gradients: Sequence[torch.Tensor], after: torch.Tensor | None, owner: int, bucket: int, schedule: str
) -> torch.Tensor:
    if after is None:
        _open(owner, schedule)
    return owner_of(owner).send(bucket, gradients)


def _open(owner: int, schedule: str) -> torch.Tensor:
    _, order = decode_schedule(schedule)
    owner_of(owner).open(order)
    return _opened(owner, schedule)


def _find_place(owner: int, bucket: int, at: int) -> tuple[torch.Tensor, float]:
    return owner_of(owner).place(bucket, at)


def _multiply(
    plus: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    is_turned: bool,
    after: torch.Tensor,
    *where: int,
) -> torch.Tensor:
    place, scale = _find_place(*where)
    multiply_into(place.t() if is_turned else place, plus, left, right, scale)
    return after.new_empty(0)  # the product itself would be memory that compilers think is theirs


def _add_rows(
    rows: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_first: bool,
    after: torch.Tensor,
    *where: int,
) -> torch.Tensor:
    place, scale = _find_place(*where)
    if is_first:
        place.zero_()
    add_rows_into(place, rows, values, mask, scale)
    return after.new_empty(0)


@torch.no_grad()
def add_rows_into(
    out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> None:
    """Add values, times `scale`, to these rows of a matrix; nothing where the mask says no."""
    num_rows, num_cols = out.shape
    if mask is not None:
        values = values.masked_fill(~mask, 0)
        rows = rows.clamp(-num_rows, num_rows - 1)
    values = values.expand(*rows.shape, num_cols).reshape(-1, num_cols)
    rows = torch.where(rows < 0, rows + num_rows, rows).reshape(-1)
    out.index_add_(0, rows, values, alpha=scale)


@torch.no_grad()
def multiply_into(
    out: torch.Tensor, plus: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    """Write `(plus + left @ right) * scale`, with the numbers that come of it step by step."""
    # Times a power of two nothing is rounded, so it can be done on the way.
    is_exact = math.frexp(scale)[0] == 0.5 and out.dtype in (torch.float32, torch.float64)
    inside = scale if is_exact else 1.0
    if plus is not None:
        torch.addmm(plus, left, right, beta=inside, alpha=inside, out=out)
    elif inside == 1.0:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(out, left, right, beta=0, alpha=inside, out=out)
    if inside != scale:
        out.mul_(scale)


def _receive(buckets: Sequence[torch.Tensor], owner: int) -> None:
    owner_of(owner).receive()


def _same(gradient: torch.Tensor, owner: int, index: int, wire: str) -> torch.Tensor:
    return torch.empty_like(gradient)


def _empty_marks(owner: int, schedule: str) -> list[torch.Tensor]:
    rooms, _ = decode_schedule(schedule)
    return [torch.empty(room.num_marks, dtype=room.dtype, device=room.device) for room in rooms]


def _empty_bucket(
    gradients: Sequence[torch.Tensor], after: torch.Tensor | None, owner: int, bucket: int, schedule: str
) -> torch.Tensor:
    room = decode_schedule(schedule)[0][bucket]
    return torch.empty(room.num_gradients + room.num_marks, dtype=room.dtype, device=room.device)


def _opened(owner: int, schedule: str) -> torch.Tensor:
    room = decode_schedule(schedule)[0][0]
    return torch.empty(0, dtype=room.dtype, device=room.device)


def _placed(one: Any, two: Any, three: Any, how: bool, after: torch.Tensor, *where: int) -> torch.Tensor:
    return after.new_empty(0)


def _nothing_left(gradient: torch.Tensor, owner: int) -> None:
    return None


def _nothing(marks: Sequence[torch.Tensor], owner: int) -> None:
    return None


for _name, _run, _pretend in (
    ("mark_gradient", _mark, _same),
    ("reduce_gradient", _reduce, _same),
    ("leave_gradients", _leave, _nothing_left),
    ("send_bucket", _send, _empty_bucket),
    ("open_buckets", _open, _opened),
    ("multiply_in_place", _multiply, _placed),
    ("add_rows_in_place", _add_rows, _placed),
    ("receive_buckets", _receive, _nothing),
    ("begin_reduction", _begin, _empty_marks),
    ("end_reduction", _end, _nothing),
):
    _library.impl(_name, traced_inside_only(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{_name}", _pretend, lib=_library)

MARK: Any = torch.ops.weft.mark_gradient.default
REDUCE: Any = torch.ops.weft.reduce_gradient.default
LEAVE: Any = torch.ops.weft.leave_gradients.default
SEND: Any = torch.ops.weft.send_bucket.default
OPEN: Any = torch.ops.weft.open_buckets.default
MULTIPLY: Any = torch.ops.weft.multiply_in_place.default
ADD_ROWS: Any = torch.ops.weft.add_rows_in_place.default
RECEIVE: Any = torch.ops.weft.receive_buckets.default
BEGIN: Any = torch.ops.weft.begin_reduction.default
END: Any = torch.ops.weft.end_reduction.default


class Marked(torch.autograd.Function):
    """Parameters as they are, with a mark on the gradient of each: `apply(owner, wire, indices, *params)`."""

    @staticmethod
    def forward(
        ctx: Any, owner: int, wire: str, indices: Sequence[int], *params: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.wire, ctx.indices = owner, wire, indices
        ctx.set_materialize_grads(False)
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        marked = [
            None if gradient is None else torch.ops.weft.mark_gradient(gradient, ctx.owner, index, ctx.wire)
            for index, gradient in zip(ctx.indices, gradients, strict=True)
        ]
        return (None, None, None, *marked)
