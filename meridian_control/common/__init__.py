"""Serves every package: errors, enum names, histograms, pages. Imports no other package of ours."""
