
-- Stock. One row for each inventory (namespace/i/name), which every change locks. `home` is
-- its number in the other tables. Times are milliseconds since 1970.
CREATE TABLE IF NOT EXISTS dlock_stock (
  id        VARBINARY(600) PRIMARY KEY,
  home      BIGINT NOT NULL,
  birth     BIGINT NOT NULL,   -- the creation id
  available BIGINT NOT NULL,
  reserved  BIGINT NOT NULL,
  sold      BIGINT NOT NULL,
  terms     MEDIUMBLOB NOT NULL,     -- what it was made with
  state     MEDIUMBLOB NOT NULL  -- everything else, with the counts of the segments
) ENGINE = InnoDB;

-- What became of each operation, for as long as the retention says.
CREATE TABLE IF NOT EXISTS dlock_stock_record (
  home       BIGINT NOT NULL,
  operation  VARBINARY(600) NOT NULL,
  generation BIGINT NOT NULL,
  record     MEDIUMBLOB NOT NULL, -- status quantity refunded epoch at expires parts buyer
  PRIMARY KEY (home, operation),
  KEY dlock_stock_record_generation (home, generation)
) ENGINE = InnoDB;

-- The open reservations.
CREATE TABLE IF NOT EXISTS dlock_stock_hold (
  home      BIGINT NOT NULL,
  operation VARBINARY(600) NOT NULL,
  expires   BIGINT NOT NULL,
  record    MEDIUMBLOB NOT NULL,
  PRIMARY KEY (home, operation),
  KEY dlock_stock_hold_expires (home, expires, operation)
) ENGINE = InnoDB;

-- The units that each buyer has, reserved and bought.
CREATE TABLE IF NOT EXISTS dlock_stock_buyer (
  home  BIGINT NOT NULL,
  buyer VARBINARY(600) NOT NULL,
  units BIGINT NOT NULL,
  PRIMARY KEY (home, buyer)
) ENGINE = InnoDB;

-- What was given back of each purchase.
CREATE TABLE IF NOT EXISTS dlock_stock_return (
  home      BIGINT NOT NULL,
  purchase  VARBINARY(600) NOT NULL,
  bought    BIGINT NOT NULL,   -- when it was bought
  place     BIGINT NOT NULL,   -- the order of the returns of a purchase
  operation VARBINARY(600) NOT NULL,
  quantity  BIGINT NOT NULL,
  at        BIGINT NOT NULL,
  damaged   BIGINT NOT NULL,
  PRIMARY KEY (home, purchase, bought, place)
) ENGINE = InnoDB;

-- The journal, numbered without gaps in the order of the commits.
CREATE TABLE IF NOT EXISTS dlock_stock_journal (
  home      BIGINT NOT NULL,
  sequence  BIGINT NOT NULL,
  effect    VARBINARY(32) NOT NULL,
  operation VARBINARY(600),
  whose     VARBINARY(600),              -- the buyer; of a refund, the operation that it refunds
  quantity  BIGINT NOT NULL,
  parts     MEDIUMBLOB NOT NULL, -- segment:units,...
  epoch     BIGINT NOT NULL,
  at        BIGINT NOT NULL,
  PRIMARY KEY (home, sequence)
) ENGINE = InnoDB;

-- How far each reader of an outbox is. Entries after it are kept.
CREATE TABLE IF NOT EXISTS dlock_stock_reader (
  home   BIGINT NOT NULL,
  reader VARBINARY(600) NOT NULL,
  done   BIGINT NOT NULL,
  PRIMARY KEY (home, reader)
) ENGINE = InnoDB;

-- Inventories that were removed in the last day; home is 0 once their rows are deleted.
CREATE TABLE IF NOT EXISTS dlock_stock_removed (
  id      VARBINARY(600) NOT NULL,
  birth   BIGINT NOT NULL,
  home    BIGINT NOT NULL,
  removed BIGINT NOT NULL,
  PRIMARY KEY (id, birth)
) ENGINE = InnoDB;

-- Tells this database from another one, or from the same one after it was made again.
INSERT IGNORE INTO dlock_meta (name, value)
  VALUES ('identity', FLOOR(RAND() * 9007199254740991));

-- The last statement: who finds the layout knows that all tables are there.
INSERT IGNORE INTO dlock_meta (name, value) VALUES ('layout', 1);
