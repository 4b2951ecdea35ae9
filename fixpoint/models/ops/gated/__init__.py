"""The gated recurrence of FastGRNN and UGRNN."""
