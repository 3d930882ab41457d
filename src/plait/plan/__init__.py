"""The plan of a run and what it decides before there are ranks: rules, axes, units, layouts."""
