"""Linears that multiply in float8: recipes, casts with scales, products, gradients."""
