"""Models as sequences of layers: names, nested values, shapes on the meta device, and their checks."""
