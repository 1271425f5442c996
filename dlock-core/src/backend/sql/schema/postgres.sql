-- The tables of dlock in PostgreSQL, layout 1. Times are microseconds since 1970, by the
-- clock of the server.
CREATE TABLE IF NOT EXISTS dlock_meta (
  name  varchar(32) PRIMARY KEY,
  value bigint NOT NULL
);
INSERT INTO dlock_meta (name, value)
  VALUES ('floor', 0), ('breaks', 0), ('swept', 0) ON CONFLICT DO NOTHING;

-- One row for each lock (namespace/l/key) and each semaphore (namespace/p/key). Only the
-- key is indexed, and each page has room, so that an update stays in its page.
CREATE TABLE IF NOT EXISTS dlock_lock (
  id        text COLLATE "C" PRIMARY KEY,
  version   bigint NOT NULL,   -- rises with every change
  token     bigint NOT NULL,   -- the highest fencing token that was given out
  holders   integer NOT NULL,
  waiters   integer NOT NULL,
  holder    text,              -- the first holder, for people
  until_us  bigint NOT NULL,   -- the last holder or waiter is gone then, unless renewed
  keep_us   bigint NOT NULL,   -- an idle row is removed some time after this
  broken_by text,
  broken_us bigint NOT NULL,
  state     bytea NOT NULL     -- all holders and waiters
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- One row for each key of `lock_in`, which locks it for a transaction.
CREATE TABLE IF NOT EXISTS dlock_row (
  id text COLLATE "C" PRIMARY KEY
);

CREATE OR REPLACE VIEW dlock_held AS
  SELECT id, token, holders, waiters, holder, broken_by,
         to_timestamp(until_us / 1000000.0) AS expires_at
  FROM dlock_lock
  WHERE to_timestamp(until_us / 1000000.0) > clock_timestamp();
