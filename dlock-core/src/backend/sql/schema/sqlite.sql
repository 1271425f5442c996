-- The tables of dlock in SQLite, layout 1. Times are microseconds of the boot clock of
-- the machine; `boot` is the boot that they belong to.
CREATE TABLE IF NOT EXISTS dlock_meta (
  name  TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT OR IGNORE INTO dlock_meta (name, value)
  VALUES ('layout', 1), ('floor', 0), ('breaks', 0), ('swept', 0), ('boot', 0);

-- One row for each lock (namespace/l/key) and each semaphore (namespace/p/key).
CREATE TABLE IF NOT EXISTS dlock_lock (
  id        TEXT PRIMARY KEY,
  version   INTEGER NOT NULL,  -- rises with every change
  token     INTEGER NOT NULL,  -- the highest fencing token that was given out
  holders   INTEGER NOT NULL,
  waiters   INTEGER NOT NULL,
  holder    TEXT,              -- the first holder, for people
  until_us  INTEGER NOT NULL,  -- the last holder or waiter is gone then, unless renewed
  keep_us   INTEGER NOT NULL,  -- an idle row is removed some time after this
  broken_by TEXT,
  broken_us INTEGER NOT NULL,
  state     BLOB NOT NULL      -- all holders and waiters
);

-- One row for each key of `lock_in`, which locks it for a transaction.
CREATE TABLE IF NOT EXISTS dlock_row (
  id      TEXT PRIMARY KEY,
  touched INTEGER NOT NULL DEFAULT 0
);
