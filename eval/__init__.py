"""The measure of answer quality: reuse modes against a full recompute, through the engine's own layers and passes."""
