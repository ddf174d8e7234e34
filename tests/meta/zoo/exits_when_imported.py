"""A module that takes its process down."""

import os

os._exit(5)
