"""Before speculation is switched on: does it pay on these prompts, and is it lossless here?"""
