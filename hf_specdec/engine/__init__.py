"""What the loop and the drafters are made of. Nothing here knows where drafts come from."""
