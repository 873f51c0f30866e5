"""`hypic calibrate`: what a deployment loses under which profile, on its own prompts, without labels."""
