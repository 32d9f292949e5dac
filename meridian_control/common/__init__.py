"""Code that every package of the control plane uses: addresses, errors, enum names, histograms and paging. The package
imports no other package of the control plane."""
