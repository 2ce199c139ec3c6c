"""The page's theme; sizes and colours of its own parts are in `style.css`."""

from __future__ import annotations

from typing import Any

import gradio as gr


def theme() -> Any:
    """Colours and fonts; only fonts that are on the visitor's machine, so that nothing is fetched from elsewhere."""
    return gr.themes.Soft(
        primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    ).set(
        block_title_background_fill="none", block_title_background_fill_dark="none", block_title_padding="0",
        block_title_text_color="*neutral_700", block_title_text_color_dark="*neutral_200",
        block_label_text_color="*neutral_700", block_label_text_color_dark="*neutral_200",
        block_label_background_fill="none", block_label_background_fill_dark="none",
        body_background_fill="*neutral_100", background_fill_primary="white",
        button_primary_background_fill="*primary_700", button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700", button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300",
    )  # fmt: skip
