"""Which colouring to take: the cheapest within an error or a bound, and one table for the question what to do.

Imports what measures errors and times, and a step under observation.
The command uses it. Errors are priced here, and the minimum cut of the compiler decides.
"""
