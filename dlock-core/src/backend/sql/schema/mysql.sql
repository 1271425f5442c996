-- The tables of dlock in MariaDB or MySQL, layout 1. Times are microseconds since 1970,
-- by the clock of the server. Keys are bytes: a collation would make two keys one.
CREATE TABLE IF NOT EXISTS dlock_meta (
  name  VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY,
  value BIGINT NOT NULL
) ENGINE = InnoDB;
INSERT IGNORE INTO dlock_meta (name, value) VALUES ('floor', 0), ('breaks', 0), ('swept', 0);

-- One row for each lock (namespace/l/key) and each semaphore (namespace/p/key).
CREATE TABLE IF NOT EXISTS dlock_lock (
  id        VARBINARY(600) PRIMARY KEY,
  version   BIGINT NOT NULL,        -- rises with every change
  token     BIGINT NOT NULL,        -- the highest fencing token that was given out
  holders   INT NOT NULL,
  waiters   INT NOT NULL,
  holder    VARBINARY(2000),        -- the first holder, for people
  until_us  BIGINT NOT NULL,        -- the last holder or waiter is gone then, unless renewed
  keep_us   BIGINT NOT NULL,        -- an idle row is removed some time after this
  broken_by VARBINARY(2000),
  broken_us BIGINT NOT NULL,
  state     MEDIUMBLOB NOT NULL     -- all holders and waiters
) ENGINE = InnoDB;

-- One row for each key of `lock_in`, which locks it for a transaction.
CREATE TABLE IF NOT EXISTS dlock_row (
  id VARBINARY(600) PRIMARY KEY
) ENGINE = InnoDB;

CREATE OR REPLACE VIEW dlock_held AS
  SELECT CONVERT(id USING utf8mb4) AS id, token, holders, waiters,
         CONVERT(holder USING utf8mb4) AS holder, CONVERT(broken_by USING utf8mb4) AS broken_by,
         TIMESTAMP('1970-01-01') + INTERVAL until_us MICROSECOND AS expires_at_utc
  FROM dlock_lock
  WHERE TIMESTAMP('1970-01-01') + INTERVAL until_us MICROSECOND > UTC_TIMESTAMP(6);
