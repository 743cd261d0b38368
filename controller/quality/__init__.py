"""How good an answer would be, and how long: embedding, store, index, estimates, learner."""
