"""The heart of the book, on integers: a problem, the three tables, the planners that fill them, and the proof.

    words, values       the words that arguments take; reading of single values
    table               tables of integers, as columns
    areas               who sees whom                    (the first table)
    ownership           who holds which row, and layouts (the second)
    schedule            who computes and sends what      (the third)
    problem             one call as integers, and the first two tables made of it
    balanced            the layout "balanced", decided by the work of each document
    planners            makers of schedules, one for each `cp_comm_type`
    verify              the proof that a schedule computes every pair once, and its costs

Both packages run these schedules. They need numpy alone, and nothing else of the project.
"""
