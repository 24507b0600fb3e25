# Nothing of it is needed here.
