"""Units: the parameters that are reduced together, in flat buffers."""
