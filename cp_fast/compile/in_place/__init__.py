"""Plans that are updated in place: the next batch's plan in the shape of the first one's.

- shape             the constant part: instructions, messages, and their sizes
- fit               a batch's plan in that shape
- instruction_keys  which instructions of two batches correspond
- moved_messages    the places of messages in padded buffers
- padded_tables     tables of constant size
- fixed_tables      the tables on the device, overwritten by one copy
"""
