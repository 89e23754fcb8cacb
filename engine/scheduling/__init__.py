"""Continuous batching: which sequences and adapters run in the next step. The way of a request through the files:

request_limits        refuse what can never run
unstarted_requests    a bounded queue for what no step has begun
waiting_queue         its place outside the batch: it waits for its mask, its adapter or its turn, and why
  adapter_queues        those that wait for one adapter
  adapter_scheduler     which adapters are in the batch, and which are loaded next
  fairness              whose turn it is: fair shares by Virtual Token Counters
    tenant_order          the first of many sequences, without looking at all of them
scheduler             plan a step, launch it, process its results
  running_batch         the sequences that are computed, their blocks and places; preemption
  in_flight_steps       rows of launched steps, while the scheduler runs ahead of the device
  grammar_advance       forced tokens, and the end of a document
  stop_conditions       the end by tokens alone
step_statistics       what the steps computed
"""
