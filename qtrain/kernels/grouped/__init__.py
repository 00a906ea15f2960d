"""Grouped operations: rows sorted into groups (the tokens of each expert), and products of each group with a matrix of
its own."""
