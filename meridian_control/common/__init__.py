"""What every package may import: errors, enum names, histograms, pages. Imports no other package of ours."""
