"""`hf-specdec check`: does speculation pay on these prompts, is it lossless here, and with which settings."""
