"""The leaky recurrence h <- a h + b sigma(A h + u_t) of ERNN, FastRNN and RNN."""
