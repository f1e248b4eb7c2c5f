"""Load generation, tier measurements and cache simulation: the `tieredkv bench` and `tieredkv simulate` commands."""
