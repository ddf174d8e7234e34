"""Options and tables of both packages' command lines."""
