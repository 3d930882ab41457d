"""The candidate run of a verification: the plan's ranks, compared after each instruction."""
