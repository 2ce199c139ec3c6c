"""Tools around the decoder: fetch a small chat model, run the demo, describe the environment."""
