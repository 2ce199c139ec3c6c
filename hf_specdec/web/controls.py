"""What a visitor can set besides the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from .examples import examples
from .models import Family
from .settings import MOST_DRAFT_TOKENS, NEEDS_DRAFT, STRATEGIES, Limits


def place_controls(families: Mapping[str, Family], limits: Limits) -> list[Any]:
    """Lay out the controls, and return them in the order of `RunSettings`' fields, the prompt left out.

    Args:
        families: The models that are offered, by key; the first is the default.
        limits: What a visitor may ask for.
    """
    first = examples()[0]
    models = [(each.title, key) for key, each in families.items()]
    any_draft = any(each.draft is not None for each in families.values())
    strategies = [(title, name) for name, title in STRATEGIES.items() if any_draft or name not in NEEDS_DRAFT]
    new_tokens = min(first.max_new_tokens, limits.new_tokens)
    with gr.Accordion("Settings", open=True):
        with gr.Row():
            family = gr.Dropdown(
                models, value=models[0][1], label="Model", allow_custom_value=True, elem_id="sd-family", min_width=160
            )
            strategy = gr.Dropdown(
                strategies,
                value="auto",
                label="Strategy",
                allow_custom_value=True,
                elem_id="sd-strategy",
                min_width=160,
            )
        length = gr.Slider(
            0, MOST_DRAFT_TOKENS, value=0, step=1, label="Draft tokens a round (0: automatic)", elem_id="sd-length"
        )
        with gr.Row():
            temperature = gr.Slider(
                0, 2, value=first.temperature, step=0.1, label="Temperature (0: greedy)", elem_id="sd-temperature",
                min_width=140,
            )  # fmt: skip
            tokens = gr.Slider(
                1, limits.new_tokens, value=new_tokens, step=1, label="New tokens", elem_id="sd-tokens", min_width=140
            )
        with gr.Row():
            chat = gr.Checkbox(True, label="Chat template", elem_id="sd-chat", min_width=140)
            seed = gr.Number(0, label="Seed", precision=0, elem_id="sd-seed", min_width=140)
    return [family, strategy, length, temperature, tokens, chat, seed]
