"""The figures that the README shows: a choice of the newest answers, good ones and bad ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from summary import Answer

BEGIN, END = "<!-- measured: made by scripts/bench --table -->\n", "<!-- /measured -->\n"


@dataclass(frozen=True)
class Headline:
    """One row: a case of a question, a candidate, and what it is held against."""

    what: str
    question: str
    case: str
    against: str
    candidate: str


ON_CPU = [
    Headline("all-reduce, 25 MB", "collectives", "all-reduce 25 MB, 2 ranks", "gloo", "weft"),
    Headline("all-gather, 25 MB", "collectives", "all-gather 25 MB, 2 ranks", "gloo", "weft"),
    Headline("", "collectives", "all-gather 25 MB, 2 ranks", "MPICH", "weft"),
    Headline("DDP, MLP of 16 M", "data_parallel", "MLP 4x2000", "torch", "weft local"),
    Headline("", "data_parallel", "MLP 4x2000", "torch", "weft gloo"),
    Headline("DDP, GPT of 13.8 M", "data_parallel", "GPT 13.8 M", "torch", "weft local"),
    Headline("DDP, 600 small tensors", "data_parallel", "600 tiny", "torch", "weft local"),
    Headline("DDP, MLP, int8 gradients", "data_parallel", "MLP 4x2000", "weft gloo", "int8 gloo"),
    Headline("fully_shard, MLP", "fully_shard", "MLP 4x2000", "torch", "weft local"),
    Headline("fully_shard, GPT", "fully_shard", "GPT 13.8 M", "torch", "weft local"),
    Headline("", "fully_shard", "GPT 13.8 M", "torch", "weft gloo"),
    Headline("tensor parallel, width 256", "tensor_parallel", "MLP 256", "torch", "weft local"),
    Headline("tensor parallel, width 2048", "tensor_parallel", "MLP 2048", "torch", "weft local"),
    Headline("compiled, GPT", "compiled", "GPT 13.8 M", "torch view", "weft local"),
    Headline("", "compiled", "GPT 13.8 M", "torch view", "weft gloo"),
    Headline("clip_grad_norm_, 600 shards", "clip_grad_norm", "600 sharded", "torch", "weft local"),
    Headline("remote call of nothing", "rpc", "null call", "torch", "weft"),
    Headline("remote echo, 16 MB", "rpc", "echo 16 MB", "torch", "weft"),
    Headline("backward over RPC, 64 x 64", "dist_autograd", "matmul 64 x 64", "torch", "weft"),
    Headline("recommender, a step", "dist_autograd", "recommender, a step", "torch", "weft"),
]
ON_GPU = [
    Headline(
        "all-reduce, 256 MB, 2 ranks on the GPU",
        "collectives_gpu",
        "all-reduce 256 MB on one GPU, 2 ranks",
        "gloo",
        "weft",
    ),
    Headline("DDP, GPT of 839 M, 1 rank", "data_parallel_gpu", "GPT 839 M, bf16", "torch", "weft"),
    Headline("DDP, 580 small tensors, 1 rank", "data_parallel_gpu", "580 small tensors", "torch", "weft"),
    Headline("fully_shard, GPT, 8 rows, 1 rank", "fully_shard_gpu", "GPT 839 M, 8 rows", "torch", "weft"),
    Headline("fully_shard, GPT, 4 rows, 1 rank", "fully_shard_gpu", "GPT 839 M, 4 rows", "torch", "weft"),
    Headline("compiled replicate, GPT, 1 rank", "compiled_gpu", "GPT 839 M, bf16", "bare", "weft"),
]


def format_headlines(answers: Sequence[Answer]) -> str:
    """Both tables, each under a line that says when and on what it was measured."""
    return f"{_format_table(answers, ON_CPU)}\n{_format_table(answers, ON_GPU)}"


def _format_table(answers: Sequence[Answer], headlines: Sequence[Headline]) -> str:
    by_question = {answer.question: answer for answer in answers}
    used = {line.question: by_question[line.question] for line in headlines if line.question in by_question}
    dates = sorted({answer.date for answer in used.values()})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = sorted({answer.machine for answer in used.values()})
    rows = [
        f"{days}, {' and '.join(machines)}:",
        "",
        "| ms | against | | weft | | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for line in headlines:
        medians = used[line.question].medians.get(line.case, {}) if line.question in used else {}
        if line.against in medians and line.candidate in medians:
            theirs, ours = medians[line.against], medians[line.candidate]
            cells = [line.what, line.against, f"{theirs * 1e3:.3g}", line.candidate, f"{ours * 1e3:.3g}"]
            rows.append(f"| {' | '.join(cells)} | {ours / theirs:.2f} |")
    return "\n".join(rows) + "\n"


def put_headlines(page: str, answers: Sequence[Answer]) -> str:
    """The page with these figures between its two marks; as it is, where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}{format_headlines(answers)}{end}{after}" if end else page
