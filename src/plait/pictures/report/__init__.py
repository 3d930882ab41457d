"""The page of a training run, from the files that it wrote: figures, charts, timeline, plan, warnings."""
