//! The names of homes: in a cluster they are chosen so that every primary serves as many
//! homes as the others.

use std::sync::Arc;

use dlock::{Dlock, Key};
use hashbrown::HashMap;

use crate::error::Result;
use crate::inventory::backing::{on_driver, store};
use crate::store::Store;

/// How many names are tried for a home before one on any server is taken.
const MOST_TRIED: u32 = 10_000;

/// The keys of the first homes of a sale. The name of a home does not depend on how many
/// there are.
pub(super) async fn of_homes(dlock: &Dlock, key: &Key, homes: usize) -> Result<Vec<Key>> {
    let key = key.clone();
    let choose = move |store: Arc<dyn Store>| async move { chosen(&*store, &key, homes).await };
    on_driver(dlock, store(dlock)?, choose).await
}

async fn chosen(store: &dyn Store, key: &Key, homes: usize) -> Result<Vec<Key>> {
    let first = store.server_of(key).await?;
    let mut keys = vec![key.clone()];
    if first.is_empty() {
        for home in 1..homes {
            keys.push(key.part(&format!("home{home}"))?);
        }
        return Ok(keys);
    }
    let mut counts: HashMap<String, usize> = servers(store, key).await?;
    *counts.entry(first).or_default() += 1;
    for home in 1..homes {
        let fewest = counts.values().copied().min().unwrap_or(0);
        let mut tried = 0;
        let (name, server) = loop {
            let name = key.part(&format!("home{home}-{tried}"))?;
            let server = store.server_of(&name).await?;
            tried += 1;
            let count = counts.get(&server).copied().unwrap_or(0);
            if count <= fewest || tried == MOST_TRIED {
                break (name, server);
            }
        };
        *counts.entry(server).or_default() += 1;
        keys.push(name);
    }
    Ok(keys)
}

/// The servers that have keys, found by asking for many names.
async fn servers(store: &dyn Store, key: &Key) -> Result<HashMap<String, usize>> {
    let mut servers = HashMap::new();
    for probe in 0..4_096 {
        servers.insert(store.server_of(&key.part(&format!("probe{probe}"))?).await?, 0);
    }
    Ok(servers)
}
