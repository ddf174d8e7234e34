"""From the tiles of a step to few launches. A chapter imports those above it.

- row_spans      rows as spans, and where they lie in a buffer
- segments       a tile's window, and the segments of launches
- merge_tiles    passes on tiles of one area
- shared_rows    passes on areas that share rows
- launches       segments in few launches
- tile_groups    the launches of a step, by heads
"""
