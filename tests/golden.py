"""What must not change when the code is rearranged, as text: run it before and after, and compare.

    python -m tests.golden --write before
    python -m tests.golden --check before          # plays again, and shows the first difference
    python -m tests.golden --compare before after  # of two folders

A folder has `digests.txt`, a line for each entry, and `texts.zip` with the entries themselves. The entries are

- plan N          the schedule, and for every rank the instructions and the digests of all tables, of a drawn call of
                  `make_plan`: every schedule, format, layout and mask, cp 1 to 8; of some also after an update
- refused N       what both packages say of calls that are drawn without care
- layer N ...     the messages of every rank, and the bits of results and gradients, of a drawn call of each of the six
                  functions on both packages (`tests.golden_layers`)
- attack ...      what a public function says of each argument replaced by wrong values (`tests.refusals.attacks`)
- name ...        signature and docstring of each public name
- message ...     the error messages in the sources, with a mark in the place of each value
- command ...     the help of each command

Everything is drawn from fixed seeds, and the public functions are called: a folder that an older commit wrote is as
good as one of today. It takes at most three minutes of one core.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import os
import random
import re
import resource
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from difflib import unified_diff
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import conformance
import conformance.cli
import cp_fast
import cp_fast.checkpoint
import cp_fast.tools.cli
import cp_ref
import cp_ref.cli
from cp_fast.integrations import flash_attn, loss, megatron, ring_flash_attn, sdpa, token_batches, transformer_engine
from cp_ref import SimGroup
from tests.golden_layers import layer_entries

__all__ = ["compared", "entries", "write"]

ROOT = Path(__file__).parents[1]
PLANS = 1000
CARELESS = 400
LAYERS = 240
DIFFERENT = 60  # lines of a difference that are shown
Entry = tuple[str, str]  # name, text


# Calls of `make_plan`

MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right")
COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LAYOUTS = ("dual_chunk", "contiguous", "balanced", "table")


@dataclasses.dataclass
class Drawn:
    """A call: the context's arguments, those of `make_plan`, and lengths for an update."""

    cp_size: int
    comm: str
    inner: int  # ranks that exchange heads
    layout: str
    arguments: dict[str, Any]
    update: dict[str, Any] | None = None

    def __str__(self) -> str:
        shown = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in self.arguments.items()}
        return f"cp {self.cp_size} {self.comm} {self.inner} {self.layout} {shown} update {self.update}"


def drawn(number: int) -> Drawn:
    """A call that is right, or nearly always."""
    rng = random.Random(f"plan {number}")
    cp_size = 1 + number % 8
    comm, layout = COMMS[number // 8 % 4], LAYOUTS[number // 32 % 4]
    inner = {"a2a": cp_size, "a2a+p2p": rng.choice([n for n in range(1, cp_size + 1) if cp_size % n == 0])}.get(comm, 1)
    heads_kv = rng.choice([n for n in range(1, 3 * inner + 1) if n % inner == 0 or inner % n == 0])
    heads_q = heads_kv * rng.choice([1, 2, 4]) * (1 if heads_kv % inner == 0 else inner // heads_kv)
    thd = rng.random() < 0.6
    fmt, mask = "thd" if thd else rng.choice(["bshd", "sbhd"]), rng.choice(MASKS)
    if layout in ("balanced", "table") and not thd and not mask.startswith("padding"):
        mask = "padding_causal"
    itself = layout in ("balanced", "table") or rng.random() < 0.7
    unit = rng.choice([1, 2 * cp_size, 2 * cp_size * rng.choice([16, 256])])
    count = rng.choice([1, 1, 2, 3, 5, 12]) if thd else rng.choice([1, 2])
    slots_q, len_q = _lengths(rng, count, unit, thd)
    slots_kv, len_kv = (slots_q, len_q) if itself else _lengths(rng, count, unit, thd)
    d_qk, d_v = rng.choice([(64, 64), (128, 128), (192, 128)])
    given: dict[str, Any] = {
        "qkv_format": fmt, "attn_mask_type": mask, "heads_q": heads_q, "heads_kv": heads_kv, "d_qk": d_qk, "d_v": d_v,
        "dtype": rng.choice([torch.bfloat16, torch.float32]), "device": "cpu",
    }  # fmt: skip
    if thd:
        given |= {"cu_seqlens_q": _cu(len_q), "cu_seqlens_q_padded": _cu(slots_q)}
        given |= {} if itself else {"cu_seqlens_kv": _cu(len_kv), "cu_seqlens_kv_padded": _cu(slots_kv)}
        given["attn_mask_type"] = mask if mask.startswith("padding") else None
    else:
        given |= {"batch_size": count, "seqlen_q": slots_q[0], "seqlen_kv": slots_kv[0]}
        if mask.startswith("padding"):
            given |= {"cu_seqlens_q": _cu(len_q), "cu_seqlens_kv": _cu(len_q if itself else len_kv)}
    if rng.random() < 0.4:
        longest = max(slots_q)
        given["window_size"] = (rng.randint(0, longest), rng.choice([0, 0, -1, rng.randint(0, longest)]))
    elif thd and itself and rng.random() < 0.4:
        given |= {"areas": _areas(rng, len_q, slots_q), "attn_mask_type": None}
    if layout == "table":
        given["layout"] = _table(rng, slots_q, cp_size)
    given |= rng.choice([{}, {"softmax_type": "learnable"}, {"softcap": 20.0}, {"deterministic": True}])
    given |= rng.choice([{}, {}, {"dropout_p": 0.1}, {"score_mod": halved}])
    call = Drawn(cp_size, comm, inner, layout, given)
    if thd and itself and "areas" not in given and layout != "table" and rng.random() < 0.3:
        total = -(-sum(slots_q) // (2 * cp_size)) * 2 * cp_size
        given |= {"max_sequences": count + 2, "max_tokens_q": total, "dropout_p": 0.0, "score_mod": None}
        _, later = _lengths(rng, count, unit, thd)
        later = later if sum(later) <= total else [n // 2 for n in len_q]
        call.update = {"cu_seqlens_q": [0, *accumulate(later)]}
    elif itself and "areas" not in given and rng.random() < 0.3:
        given["linear"] = True
    return call


def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod."""
    return score / 2


def _lengths(rng: random.Random, count: int, unit: int, thd: bool) -> tuple[list[int], list[int]]:
    """Slots of sequences, and tokens."""
    slots = (
        [unit * rng.choice([0, 1, 1, 2, 3, 7, 20]) for _ in range(count)] if thd else [unit * rng.randint(1, 9)] * count
    )
    return slots, [rng.choice([n, n, rng.randint(0, n)]) for n in slots]


def _cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _areas(rng: random.Random, lengths: list[int], slots: list[int]) -> torch.Tensor:
    """A named mask for each sequence."""
    makers: list[Callable[[int], torch.Tensor]] = [
        lambda n: cp_fast.masks.prefix_lm(n // 3, n),
        lambda n: cp_fast.masks.block_causal(n, max(1, n // 5)),
        lambda n: cp_fast.masks.chunked(n, max(1, n // 4)),
        lambda n: cp_fast.masks.first_tokens_and_window(n, min(n, 3), max(1, n // 6)),
        lambda n: cp_fast.masks.shared_prefix(n - 3 * (n // 4), [n // 4] * 3),
        lambda n: cp_fast.masks.dilated_blocks(n, max(1, n // 9), 2),
    ]
    return cp_fast.masks.packed([rng.choice(makers)(n) for n in lengths], [0, *accumulate(slots)][:-1])


def _table(rng: random.Random, slots: list[int], cp_size: int) -> list[tuple[int, int, int, int]]:
    """Every sequence in pieces, each on some rank."""
    found: list[tuple[int, int, int, int]] = []
    for number, length in enumerate(slots):
        size = max(1, length // rng.randint(1, 2 * cp_size))
        cuts = [*range(0, length, size), length]
        found += [(rng.randrange(cp_size), number, a, b) for a, b in pairwise(cuts) if a < b]
    return sorted(found)


def careless(number: int) -> Drawn:
    """A call whose arguments were drawn one by one: few are right."""
    rng = random.Random(f"careless {number}")
    call = drawn(rng.randrange(PLANS))
    call.layout = rng.choice(LAYOUTS[:3])
    other = drawn(rng.randrange(PLANS)).arguments
    for name in rng.sample(sorted(other), rng.choice([1, 1, 2, 4])):
        call.arguments[name] = other[name]
    for name in rng.sample(sorted(call.arguments), rng.choice([0, 0, 1])):
        if name not in ("heads_q", "heads_kv", "d_qk", "d_v", "dtype", "device"):
            del call.arguments[name]
    odd = {
        "window_size": [(-2, 0), (3, -5), (2**40, 1)], "softcap": [-1.0, float("nan")], "heads_kv": [3, 0, 7],
        "d_qk": [0, 300], "dropout_p": [1.0, -0.5], "max_sequences": [0, 1], "max_tokens_q": [1, 7],
        "attn_mask_type": ["arbitrary", "causal"], "softmax_type": ["sink"], "qkv_format": ["bhsd", "thd"],
    }  # fmt: skip
    for name in rng.sample(sorted(odd), rng.choice([0, 1, 1, 2])):
        call.arguments[name] = rng.choice(odd[name])
    return call


def planned(package: Any, call: Drawn, show: Callable[[Any, Any], Any]) -> list[Any]:
    """By rank, what `show` says of a context and a plan; or the error."""

    def one(member: Any) -> Any:
        how = {"layout": call.layout if call.layout != "table" else "dual_chunk"}
        try:
            cp = package.ContextParallel(
                member.split(call.inner) if call.comm == "a2a+p2p" else member, call.comm, **how
            )
            return show(cp, package.make_plan(cp=cp, **call.arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"

    return SimGroup(call.cp_size).run(one)


def plan_entries(numbers: range) -> Iterator[Entry]:
    """Schedules, instructions and tables."""
    for number in numbers:
        call = drawn(number)

        def show(cp: Any, plan: Any, call: Drawn = call) -> str:
            parts = [_schedules(plan), _of_rank(plan)]
            if call.update is not None:
                lengths = {name: torch.tensor(x, dtype=torch.int32) for name, x in call.update.items()}
                try:
                    plan.update(cp=cp, **lengths)
                    parts += ["updated", _of_rank(plan)]
                except ValueError as error:  # It has no room.
                    parts.append(f"not updated: {error}")
            return "\n".join(parts)

        ranks = planned(cp_fast, call, show)
        reference = planned(cp_ref, call, lambda cp, plan: _schedules(plan))[0]
        lines = [str(call), "schedule of cp_ref", str(reference), *(f"rank {n}\n{x}" for n, x in enumerate(ranks))]
        yield f"plan {number:04}", plain("\n".join(lines))


def _schedules(plan: Any) -> str:
    """Those of all ranks, once."""
    return "" if plan.rank else "\n".join([str(plan.schedule), *([str(plan.states)] if plan.linear else [])])


def _of_rank(plan: Any) -> str:
    if not plan.problem.position_free_scores:
        plan.batch.positions.make()
    tables = {
        "instructions": plan.programs,
        "positions": plan.batch.positions,
        "position_ids": plan.position_ids,
    }
    lines = [f"{name} {line}" for name, thing in tables.items() for line in dict.fromkeys(table_lines(thing, set()))]
    return "\n".join([str(plan.programs), *lines])


def table_lines(thing: Any, seen: set[int]) -> Iterator[str]:
    """A line for each array inside of a thing, in order."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().numpy()
    if isinstance(thing, np.ndarray):
        digest = hashlib.blake2b(np.ascontiguousarray(thing).tobytes(), digest_size=8).hexdigest()
        yield f"{thing.dtype} {list(thing.shape)} {digest}"
    elif id(thing) not in seen:
        seen.add(id(thing))
        if isinstance(thing, dict):
            inside = list(thing.values())
        elif isinstance(thing, list | tuple):
            inside = list(thing)
        elif type(thing).__name__ == "Spans":
            inside = [thing.start, thing.stop]  # no caches
        elif type(thing).__module__.startswith("cp_fast") and not isinstance(thing, type):
            slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
            inside = [*slots, *getattr(thing, "__dict__", {}).values()]
        else:
            inside = []
        for part in inside:
            yield from table_lines(part, seen)


def refusal_entries(numbers: range) -> Iterator[Entry]:
    """What both packages say of careless calls."""
    for number in numbers:
        call = careless(number)
        said = {package.__name__: planned(package, call, lambda cp, plan: "planned") for package in (cp_fast, cp_ref)}
        lines = [f"{name} rank {n}: {words}" for name, ranks in said.items() for n, words in enumerate(ranks)]
        yield f"refused {number:04}", plain("\n".join([str(call), *lines]))


# Arguments that are wrong


def attack_entries(share: int = 1) -> Iterator[Entry]:
    """What public functions say of wrong values on all ranks; one parameter in `share`."""
    from tests.refusals.attacks.attack_calls import Attack, played
    from tests.refusals.attacks.attack_kinds import KINDS
    from tests.refusals.attacks.attack_targets import TARGETS

    parameters = [(name, parameter) for name, target in TARGETS.items() for parameter in target.parameters]
    for name, parameter in parameters[::share]:
        lines: list[str] = []
        for kind in KINDS:
            try:
                outcomes = played(TARGETS[name], Attack(name, parameter, kind, alone=False))
                said = [f"{type(error).__name__}: {error}" if error else "accepted" for error, _ in outcomes]
            except Exception as error:  # of the group, where the ranks part
                said = [f"{type(error).__name__}: {error}"]
            said = ["no memory" if _NO_MEMORY.search(words) else words for words in said]
            lines.append(f"{kind} -> {' | '.join(dict.fromkeys(said))}")
        yield f"attack {name}, {parameter}", plain("\n".join(lines))


_NO_MEMORY = re.compile(r"MemoryError|can't allocate memory|not enough memory|Unable to allocate")
_MEMORY = 2**32  # bytes that attacks may ask for: the same outcome on every machine


def limit_memory() -> None:
    """From here on this process gets little more memory than it has: some attacks ask for all."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def plain(text: str) -> str:
    """A text without addresses and paths."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x-", text).replace(str(ROOT), "")
    return re.sub(r"(?<=at )/\S+|/tmp/\S+", "/-", text)


# Names, messages, commands

MODULES: dict[str, Any] = {
    "cp_ref": cp_ref, "cp_fast": cp_fast, "conformance": conformance, "cp_fast.thd": cp_fast.thd,
    "cp_fast.masks": cp_fast.masks, "cp_fast.checkpoint": cp_fast.checkpoint, "flash_attn": flash_attn, "loss": loss,
    "megatron": megatron, "ring_flash_attn": ring_flash_attn, "sdpa": sdpa, "token_batches": token_batches,
    "transformer_engine": transformer_engine,
}  # fmt: skip


def name_entries() -> Iterator[Entry]:
    """Signatures and docstrings."""
    for module, names in ((m, sorted(m.__all__)) for m in MODULES.values()):
        for name in names:
            thing = getattr(module, name)
            lines = [_described(thing)]
            if inspect.isclass(thing):
                members = [n for n in dir(thing) if n[0] != "_" and not hasattr(object, n)]
                lines += [f".{n} {_described(inspect.getattr_static(thing, n))}" for n in sorted(members)]
            yield f"name {module.__name__}.{name}", plain("\n".join(lines))


def _described(thing: Any) -> str:
    thing = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    try:
        signature = str(inspect.signature(thing))
    except (TypeError, ValueError):
        signature = type(thing).__name__
    return f"{signature}\n{inspect.getdoc(thing) or ''}" if callable(thing) else signature


def message_entries() -> Iterator[Entry]:
    """The texts of all errors that the packages raise, each once, wherever it stands."""
    for package in ("cp_ref", "cp_fast", "conformance"):
        found = set[str]()
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    found |= {f"{ast.unparse(node.exc.func)}: {_template(x)}" for x in node.exc.args}
        yield f"message {package}", "\n".join(sorted(text for text in found if not text.endswith(": {}")))


def _template(node: ast.expr) -> str:
    """A text with a mark for each value.

    >>> _template(ast.parse('f"d_qk is {d}; " + "it must be even"', mode="eval").body)
    'd_qk is {}; it must be even'
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "{}"


def command_entries() -> Iterator[Entry]:
    """The help of every command."""
    from typer import Context
    from typer.main import get_command
    from typer.testing import CliRunner

    runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})
    apps = {"cp_fast": cp_fast.tools.cli.app, "cp_ref": cp_ref.cli.app, "conformance": conformance.cli.app}
    for name, app in apps.items():
        command: Any = get_command(app)
        subcommands = command.list_commands(Context(command)) if hasattr(command, "list_commands") else []
        for words in ([], *([word] for word in subcommands)):
            yield " ".join(["command", name, *words]), plain(runner.invoke(app, [*words, "--help"]).output)


# Folders


def entries(plans: int = PLANS, careless: int = CARELESS, share: int = 1) -> Iterator[Entry]:
    """All of them; fewer for a test."""
    yield from name_entries()
    yield from message_entries()
    yield from command_entries()
    yield from plan_entries(range(plans))
    yield from refusal_entries(range(careless))
    yield from layer_entries(range(LAYERS if plans else 0))
    if share:
        limit_memory()
        yield from attack_entries(share)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()


def write(folder: Path, some: Iterator[Entry]) -> int:
    """A folder with the entries' digests and texts; how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with zipfile.ZipFile(folder / "texts.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as texts:
        for name, text in some:
            lines.append(f"{digest(text)} {name}\n")
            texts.writestr(zipfile.ZipInfo(name), text.encode(errors="replace"), zipfile.ZIP_DEFLATED)
    (folder / "digests.txt").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read(folder: Path) -> dict[str, str]:
    """The digest of each entry."""
    lines = (folder / "digests.txt").read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition(" ") for line in lines)}


def compared(one: Path, other: Path) -> str:
    """What differs between two folders: how many entries of each kind, their names, and the first difference; an empty
    text if they are equal.
    """
    a, b = read(one), read(other)
    differ = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    if not differ:
        return ""
    kinds = [name.partition(" ")[0] for name in differ]
    counts = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
    shown = [f"{len(differ)} of {len(a | b)} entries differ: {counts}", *(f"  {name}" for name in differ[:DIFFERENT])]
    first = differ[0]
    before, after = (_text(folder, first).splitlines() for folder in (one, other))
    difference = list(unified_diff(before, after, f"{one}: {first}", f"{other}: {first}", lineterm="", n=2))
    return "\n".join([*shown, *difference[:DIFFERENT]])


def _text(folder: Path, name: str) -> str:
    with zipfile.ZipFile(folder / "texts.zip") as texts:
        return texts.read(name).decode() if name in texts.namelist() else ""


def main(
    write_: Annotated[Path | None, typer.Option("--write", help="The folder to write.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="A folder that must come out again.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option("--compare", help="Two folders.")] = None,
    now: Annotated[Path, typer.Option(help="Where --check writes what it finds.")] = Path("golden_now"),
    plans: Annotated[int, typer.Option(help="How many plans.")] = PLANS,
    careless: Annotated[int, typer.Option(help="How many careless calls.")] = CARELESS,
    share: Annotated[int, typer.Option(help="One of so many arguments is attacked; 0: none.")] = 1,
) -> None:
    """Write a folder, or compare; exit with 1 if something differs."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # Messages may list sets.
        os.environ |= {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}  # The latter: ranks are threads.
        os.execv(sys.executable, [sys.executable, "-m", "tests.golden", *sys.argv[1:]])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if (write_ is not None) + (check is not None) + (compare is not None) != 1:
        raise typer.BadParameter("give one of --write, --check and --compare")
    if compare is None:
        folder = write_ or now
        print(f"{write(folder, entries(plans, careless, share))} entries in {folder}")
    pair = compare or (check, now)
    if pair[0] is not None:
        said = compared(pair[0], pair[1])
        print(said or "nothing differs")
        raise typer.Exit(1 if said else 0)


if __name__ == "__main__":
    typer.run(main)
