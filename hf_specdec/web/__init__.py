"""The demo page: one prompt decoded with speculation off and on, side by side. Needs the extra `web` (Gradio)."""
