"""Models of images that have no function as `get_image_features`: they run over ranks with text alone.

A call with text does not reach their modules of images, which keep their own attention. A call with images is refused
by the name of its argument.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from cp_fast.integrations.hugging_face.slice_probe import at_rest, takes_cache, trial_rows

__all__ = ["unreached_parts"]


def unreached_parts(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules of a model of images that a call with text does not reach; nothing of a model of text.

    Raises:
        NotImplementedError: the model does not run with text alone.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "vision_config", None) is None:
        return ()
    reached: set[nn.Module] = set()
    ids = trial_rows(model, next(model.parameters()).device).ids
    with ExitStack() as stack, at_rest(model):
        for module in model.modules():
            hook = module.register_forward_pre_hook(lambda m, _: reached.add(m))
            stack.callback(hook.remove)
        try:
            model(input_ids=ids, **({"use_cache": False} if takes_cache(model) else {}))
        except Exception as error:
            raise NotImplementedError(
                f"{type(model).__name__} reads images, in a way that cp_fast does not have: no function as "
                "get_image_features makes rows of tokens of them, and it does not run with text alone"
                f"{_text_inside(model)}"
            ) from error
    found: list[str] = []
    for where, module in model.named_modules():
        apart = reached.isdisjoint(module.modules()) and any(True for _ in module.parameters())
        if apart and not any(where.startswith(f"{one}.") for one in found):
            found.append(where)
    return tuple(found)


def _text_inside(model: Any) -> str:
    """Say in a sentence how the text model inside is prepared. "": the model has no text model."""
    text = model.config.get_text_config()
    found = (where for where, m in model.named_modules() if where and getattr(m, "config", None) is text)
    if text is model.config or (where := next(found, None)) is None:
        return ""
    return (
        f". The text model inside can be tried alone, prepare(model.{where}, cp), and be called with inputs_embeds="
        "part['cp_batch'].shard(embeddings) in place of input_ids, where its own masks are those of text"
    )
