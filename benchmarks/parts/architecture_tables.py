"""The tables of architectures in docs/support.md, from the record of `benchmarks.sweep`."""

from __future__ import annotations

import collections
import json
import re
from typing import Any

from benchmarks.parts.performance_tables import RESULTS, markdown

__all__ = ["RECORD", "architecture_tables", "reason_of", "short"]

RECORD = "sweep.json"
TASKS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "tokens": "token classification",
    "sequences": "sequence classification",
    "questions": "question answering",
    "images": "images and text",
}
_ENDS = re.compile(
    r"(For(Causal|Masked)LM|For(Token|Sequence)Classification|ForQuestionAnswering(Simple)?|ForConditionalGeneration"
    r"|LMHeadModel|ModelWithLMHead|WithLMHeadModel)$"
)
REASONS: tuple[tuple[str, str], ...] = (  # what a refusal says, and the line of the table
    (r"has an encoder and a decoder", "an encoder and a decoder"),
    (r"takes no position_ids", "takes no `position_ids`"),
    (r"never calls its attention by", "attention written out in the model"),
    (r"reads images, in a way that cp_fast does not", "no function that makes rows of tokens of images"),
    (r"could not prove right", "images that could not be tried, or proved"),
    (r"reads (\w+); cp_fast spreads", r"reads `\1`"),
    (r"layer_types\[\d+\] is '(\w+)'", r"layers of the kind `\1`"),
    (r"calls (mamba_selective_scan)", r"`\1` (Mamba)"),
    (r"hand(s)? its keywords on|does not hand on", "its layers do not hand keywords on"),
    (r"pools over tokens", "a head that pools over tokens"),
    (r"mixes tokens", "another module than attention mixes tokens"),
    (r"other outputs than the whole", "positions, or counts of tokens, from elsewhere than `position_ids`"),
    (r"attention_mask is a tensor", "a mask of its own"),
    (r"mask_function is", "a mask that is neither causal nor a window"),
    (r"sliding window that it does not pass", "a window that its attention is not told of"),
)
_LIBRARIES = r"requires the (\w+) library|No module named '(\w+)'"


def architecture_tables() -> list[str]:
    """Counts; what is right; what is refused, by the reason; what was not built: four tables, as Markdown."""
    classes: dict[str, dict[str, Any]] = json.loads((RESULTS / RECORD).read_text())["classes"]
    return [_counts(classes), _right(classes), _refused(classes), _not_built(classes)]


def _counts(classes: dict[str, dict[str, Any]]) -> str:
    counted = collections.Counter((one["task"], one["verdict"]) for one in classes.values())
    rows: list[list[str]] = []
    for task, said in TASKS.items():
        wrong = counted[task, "wrong"] + counted[task, "raised"]
        of_task = (counted[task, "right"], counted[task, "refused"], wrong, counted[task, "not built"])
        rows.append([said, *map(str, of_task)])
    total = [str(sum(int(row[column]) for row in rows)) for column in range(1, 5)]
    head = ["classes of transformers", "right", "refused", "wrong", "not built"]
    return markdown(head, [*rows, ["all", *total]])


def _right(classes: dict[str, dict[str, Any]]) -> str:
    rows = [[said, _listed(classes, task, "right")] for task, said in TASKS.items()]
    for kind, said in {"image": "with images", "video": "with videos", "audio": "with sound"}.items():
        names = [short(n) for n, one in classes.items() if one["verdict"] == "right" and kind in one.get("with", ())]
        rows.append([f"{said}, of any task", f"{len(names)}: {', '.join(dict.fromkeys(names))}" if names else "-"])
    names = [short(n) for n, one in classes.items() if one["verdict"] == "right" and one.get("shared")]
    rows.append(['with images="ranks"', f"{len(names)}: {', '.join(dict.fromkeys(names))}" if names else "-"])
    return markdown(["right over ranks", "models"], rows)


def _listed(classes: dict[str, dict[str, Any]], task: str, verdict: str) -> str:
    return ", ".join(short(n) for n, one in classes.items() if (one["task"], one["verdict"]) == (task, verdict)) or "-"


def _refused(classes: dict[str, dict[str, Any]]) -> str:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name, one in classes.items():
        if one["verdict"] == "refused":
            found[reason_of(one["message"])].append(name)
    rows = [[why, str(len(names)), _of_families(names)] for why, names in found.items()]
    return markdown(["refused, for", "classes", "models"], sorted(rows, key=lambda row: (-int(row[1]), row[0])))


def _not_built(classes: dict[str, dict[str, Any]]) -> str:
    rows = [
        [f"{short(name)} ({TASKS[one['task']]})", _why_not(one["message"])]
        for name, one in classes.items()
        if one["verdict"] == "not built"
    ]
    return markdown(["not built", "why"], rows)


def _why_not(message: str) -> str:
    library = re.search(_LIBRARIES, message)
    if library:
        return f"needs {library[1] or library[2]}"
    return message.partition(" (modeling_")[0].replace("|", "/").replace("<", "")[:90]


def reason_of(message: str) -> str:
    """The line of the table for what a refusal says.

    >>> reason_of("layer_types[1] is 'hybrid_sliding'; cp_fast has full_attention and sliding_attention")
    'layers of the kind `hybrid_sliding`'
    """
    for pattern, said in REASONS:
        if match := re.search(pattern, message):
            return match.expand(said)
    return message.partition(";")[0].replace("|", "/")[:90]


def short(name: str) -> str:
    """A class's name without its task.

    >>> short("LlamaForCausalLM"), short("GPT2LMHeadModel")
    ('Llama', 'GPT2')
    """
    return _ENDS.sub("", name) or name


def _of_families(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(short(name) for name in names))
