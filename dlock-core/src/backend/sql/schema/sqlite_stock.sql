
-- Stock. One row for each inventory (namespace/i/name), which every change locks. `home` is
-- its number in the other tables. Times are milliseconds since 1970.
CREATE TABLE IF NOT EXISTS dlock_stock (
  id        TEXT PRIMARY KEY,
  home      INTEGER NOT NULL,
  birth     INTEGER NOT NULL,   -- the creation id
  available INTEGER NOT NULL,
  reserved  INTEGER NOT NULL,
  sold      INTEGER NOT NULL,
  terms     TEXT NOT NULL,     -- what it was made with
  state     TEXT NOT NULL      -- everything else, with the counts of the segments
);

-- What became of each operation, for as long as the retention says.
CREATE TABLE IF NOT EXISTS dlock_stock_record (
  home       INTEGER NOT NULL,
  operation  TEXT NOT NULL,
  generation INTEGER NOT NULL,
  record     TEXT NOT NULL,    -- status quantity refunded epoch at expires parts buyer
  PRIMARY KEY (home, operation)
);
CREATE INDEX IF NOT EXISTS dlock_stock_record_generation ON dlock_stock_record (home, generation);

-- The open reservations.
CREATE TABLE IF NOT EXISTS dlock_stock_hold (
  home      INTEGER NOT NULL,
  operation TEXT NOT NULL,
  expires   INTEGER NOT NULL,
  record    TEXT NOT NULL,
  PRIMARY KEY (home, operation)
);
CREATE INDEX IF NOT EXISTS dlock_stock_hold_expires ON dlock_stock_hold (home, expires, operation);

-- The units that each buyer has, reserved and bought.
CREATE TABLE IF NOT EXISTS dlock_stock_buyer (
  home  INTEGER NOT NULL,
  buyer TEXT NOT NULL,
  units INTEGER NOT NULL,
  PRIMARY KEY (home, buyer)
);

-- What was given back of each purchase.
CREATE TABLE IF NOT EXISTS dlock_stock_return (
  home      INTEGER NOT NULL,
  purchase  TEXT NOT NULL,
  bought    INTEGER NOT NULL,   -- when it was bought
  place     INTEGER NOT NULL,   -- the order of the returns of a purchase
  operation TEXT NOT NULL,
  quantity  INTEGER NOT NULL,
  at        INTEGER NOT NULL,
  damaged   INTEGER NOT NULL,
  PRIMARY KEY (home, purchase, bought, place)
);

-- The journal, numbered without gaps in the order of the commits.
CREATE TABLE IF NOT EXISTS dlock_stock_journal (
  home      INTEGER NOT NULL,
  sequence  INTEGER NOT NULL,
  effect    TEXT NOT NULL,
  operation TEXT,
  whose     TEXT,              -- the buyer; of a refund, the operation that it refunds
  quantity  INTEGER NOT NULL,
  parts     TEXT NOT NULL,     -- segment:units,...
  epoch     INTEGER NOT NULL,
  at        INTEGER NOT NULL,
  PRIMARY KEY (home, sequence)
);

-- How far each reader of an outbox is. Entries after it are kept.
CREATE TABLE IF NOT EXISTS dlock_stock_reader (
  home   INTEGER NOT NULL,
  reader TEXT NOT NULL,
  done   INTEGER NOT NULL,
  PRIMARY KEY (home, reader)
);

-- Inventories that were removed in the last day; home is 0 once their rows are deleted.
CREATE TABLE IF NOT EXISTS dlock_stock_removed (
  id      TEXT NOT NULL,
  birth   INTEGER NOT NULL,
  home    INTEGER NOT NULL,
  removed INTEGER NOT NULL,
  PRIMARY KEY (id, birth)
);

-- Tells this database from another one, or from the same one after it was made again.
INSERT OR IGNORE INTO dlock_meta (name, value)
  VALUES ('identity', abs(random() % 9007199254740991));
