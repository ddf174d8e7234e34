"""Linear layers: the declarations of the two calls, and the checks of their arguments in both packages."""
