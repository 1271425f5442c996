//! The directory of homes, which every home keeps, and the hash function that chooses one.

use dlock::Key;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The largest number of homes of one sale.
pub const MAX_HOMES: u32 = 128;

/// What decides in which home of a sale a request is answered. It is fixed when the sale is
/// created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Routing {
    /// The operation id: each id has one home. Requests without an id go to any home. There
    /// is no limit for each buyer, because the orders of one buyer are in several homes.
    #[default]
    Operation,
    /// The buyer: every deduction and reservation names one, and all that a buyer has is in
    /// one home. So a limit for each buyer is exact. An operation is known by its id and its
    /// buyer.
    Buyer,
}

/// The homes of a sale, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) routing: Routing,
    /// A random name of this creation: the homes of two sales are never mistaken for each
    /// other.
    pub(crate) creation: String,
    /// The key of each home, and the identity of its server; `-` if it needs none.
    pub(crate) homes: Vec<(Key, String)>,
}

const VERSION: &str = "homes1";

impl Directory {
    /// The text that each home keeps.
    pub(crate) fn to_text(&self) -> String {
        let routing = match self.routing {
            Routing::Operation => "operation",
            Routing::Buyer => "buyer",
        };
        let mut words = vec![VERSION, routing, &self.creation];
        for (key, server) in &self.homes {
            words.extend([key.as_str(), server]);
        }
        words.join("\t") // keys have no control characters
    }

    pub(crate) fn parse(text: &str) -> Result<Self> {
        let unreadable = || {
            Error::Conflict(
                "the directory of homes cannot be read; a newer version may have made the inventory"
                    .into(),
            )
        };
        let words: Vec<&str> = text.split('\t').collect();
        let [VERSION, routing, creation, homes @ ..] = &words[..] else { return Err(unreadable()) };
        let routing = match *routing {
            "operation" => Routing::Operation,
            "buyer" => Routing::Buyer,
            _ => return Err(unreadable()),
        };
        let mut all = Vec::new();
        for home in homes.chunks(2) {
            let [key, server] = home else { return Err(unreadable()) };
            let key = Key::new(key).map_err(|_| unreadable())?;
            all.push((key, (*server).to_owned()));
        }
        if all.len() < 2 || all.len() > MAX_HOMES as usize {
            return Err(unreadable());
        }
        Ok(Directory { routing, creation: (*creation).to_owned(), homes: all })
    }
}

/// The home of an id or of a buyer. It must never change: FNV-1a, and a finish that lets each
/// bit of it count.
pub(crate) fn home_of(id: &str, homes: usize) -> usize {
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^= hash >> 33;
    ((u128::from(hash) * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Receipts and records are found by it: another function would lose them.
    #[test]
    fn the_hash_function_is_fixed() {
        let homes = |count| ["", "a", "order-981", "u-7", "订单"].map(|id| home_of(id, count));
        assert_eq!(homes(6), [5, 3, 1, 5, 0]);
        assert_eq!(homes(128), [119, 65, 24, 123, 3]);
    }

    #[test]
    fn homes_get_equal_shares() {
        for count in [2, 3, 6, 100] {
            let mut shares = vec![0_u32; count];
            for id in 0..100_000 {
                shares[home_of(&format!("order-{id}"), count)] += 1;
            }
            let even = 100_000.0 / count as f64;
            for share in shares {
                let off = (f64::from(share) - even).abs();
                assert!(off < 5.0 * even.sqrt(), "{share} of {even} in {count}");
            }
        }
    }

    #[test]
    fn a_directory_is_read_as_it_was_written() {
        let home = |name: &str| (Key::new(name).expect("a key"), "-".to_owned());
        let homes = vec![home("a sale"), home("a sale:home1")];
        let directory = Directory { routing: Routing::Buyer, creation: "c0ffee".into(), homes };
        let text = directory.to_text();
        assert_eq!(Directory::parse(&text).expect("a directory"), directory);
        for bad in [
            "",
            "homes1",
            "homes2\tbuyer\tx\ta\t-\tb\t-",
            &format!("{text}\tc"),
            "homes1\tbuyer\tx\ta\t-",
        ] {
            assert!(matches!(Directory::parse(bad), Err(Error::Conflict(_))), "{bad}");
        }
    }
}
