
-- Stock. One row for each inventory (namespace/i/name), which every change locks. `home` is
-- its number in the other tables. Times are milliseconds since 1970.
CREATE TABLE IF NOT EXISTS dlock_stock (
  id        text COLLATE "C" PRIMARY KEY,
  home      bigint NOT NULL,
  birth     bigint NOT NULL,   -- the creation id
  available bigint NOT NULL,
  reserved  bigint NOT NULL,
  sold      bigint NOT NULL,
  terms     text NOT NULL,     -- what it was made with
  state     text NOT NULL      -- everything else, with the counts of the segments
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- What became of each operation, for as long as the retention says.
CREATE TABLE IF NOT EXISTS dlock_stock_record (
  home       bigint NOT NULL,
  operation  text COLLATE "C" NOT NULL,
  generation bigint NOT NULL,
  record     text NOT NULL,    -- status quantity refunded epoch at expires parts buyer
  PRIMARY KEY (home, operation)
);
CREATE INDEX IF NOT EXISTS dlock_stock_record_generation ON dlock_stock_record (home, generation);

-- The open reservations.
CREATE TABLE IF NOT EXISTS dlock_stock_hold (
  home      bigint NOT NULL,
  operation text COLLATE "C" NOT NULL,
  expires   bigint NOT NULL,
  record    text NOT NULL,
  PRIMARY KEY (home, operation)
);
CREATE INDEX IF NOT EXISTS dlock_stock_hold_expires ON dlock_stock_hold (home, expires, operation);

-- The units that each buyer has, reserved and bought.
CREATE TABLE IF NOT EXISTS dlock_stock_buyer (
  home  bigint NOT NULL,
  buyer text COLLATE "C" NOT NULL,
  units bigint NOT NULL,
  PRIMARY KEY (home, buyer)
);

-- What was given back of each purchase.
CREATE TABLE IF NOT EXISTS dlock_stock_return (
  home      bigint NOT NULL,
  purchase  text COLLATE "C" NOT NULL,
  bought    bigint NOT NULL,   -- when it was bought
  place     bigint NOT NULL,   -- the order of the returns of a purchase
  operation text COLLATE "C" NOT NULL,
  quantity  bigint NOT NULL,
  at        bigint NOT NULL,
  damaged   bigint NOT NULL,
  PRIMARY KEY (home, purchase, bought, place)
);

-- The journal, numbered without gaps in the order of the commits.
CREATE TABLE IF NOT EXISTS dlock_stock_journal (
  home      bigint NOT NULL,
  sequence  bigint NOT NULL,
  effect    text NOT NULL,
  operation text,
  whose     text,              -- the buyer; of a refund, the operation that it refunds
  quantity  bigint NOT NULL,
  parts     text NOT NULL,     -- segment:units,...
  epoch     bigint NOT NULL,
  at        bigint NOT NULL,
  PRIMARY KEY (home, sequence)
);

-- How far each reader of an outbox is. Entries after it are kept.
CREATE TABLE IF NOT EXISTS dlock_stock_reader (
  home   bigint NOT NULL,
  reader text COLLATE "C" NOT NULL,
  done   bigint NOT NULL,
  PRIMARY KEY (home, reader)
);

-- Inventories that were removed in the last day; home is 0 once their rows are deleted.
CREATE TABLE IF NOT EXISTS dlock_stock_removed (
  id      text COLLATE "C" NOT NULL,
  birth   bigint NOT NULL,
  home    bigint NOT NULL,
  removed bigint NOT NULL,
  PRIMARY KEY (id, birth)
);

-- Tells this database from another one, or from the same one after it was made again.
INSERT INTO dlock_meta (name, value)
  VALUES ('identity', floor(random() * 9007199254740991)::bigint)
  ON CONFLICT DO NOTHING;

-- The last statement: the tables are complete.
INSERT INTO dlock_meta (name, value) VALUES ('layout', 1) ON CONFLICT DO NOTHING;
