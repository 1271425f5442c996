//! Inventories in Redis, on the connection of the client's locks. Every change is one
//! script; `lua/layout.lua` says what is stored.

pub(crate) mod codec;

use std::sync::OnceLock;

use dlock::Key;
use dlock::backend::redis::extension::Script;
use dlock::extension::ClientExtension;
use redis::Value;

use self::codec::Batch;
use super::{
    Answer, Call, Change, Counts, Cursor, Durability, InventoryId, JournalEntry, Page, Request,
    Store, Terms, View, missing, record_codec,
};
use crate::error::{Error, Result};

macro_rules! script {
    ($($file:literal),*) => {
        concat!(
            include_str!("lua/layout.lua"),
            $(include_str!(concat!("lua/", $file, ".lua"))),*
        )
    };
}

struct Scripts {
    create: Script,
    open: Script,
    remove: Script,
    apply: Script,
    change: Script,
    look: Script,
}

fn scripts() -> &'static Scripts {
    static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
    SCRIPTS.get_or_init(|| Scripts {
        create: Script::new(script!("head", "rights", "create")),
        open: Script::new(script!("head", "rights", "open")),
        remove: Script::new(script!("head", "remove")),
        apply: Script::new(script!(
            "apply_short",
            "head",
            "apply_first",
            "apply_segments",
            "apply_records",
            "apply_returns",
            "apply_moves",
            "apply"
        )),
        change: Script::new(script!("head", "change")),
        look: Script::new(script!("head", "look")),
    })
}

/// Fields and values of a hash, which need not be UTF-8.
type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// The inventories in the Redis of a client. Its calls must be polled on the driver of
/// the client.
#[derive(Clone, Debug)]
pub struct Redis {
    client: ClientExtension,
    /// In a cluster all keys are declared and exist; see `lua/layout.lua`.
    is_ring: bool,
}

/// All keys of an inventory in a cluster.
const KEYS: [&str; 14] = ["", "t", "z", "h", "x", "b", "r", "m", "j", "e", "o0", "o1", "o2", "o3"];

impl Redis {
    /// The inventories in the lock store of this client; `None` if that is not Redis.
    pub fn new(client: ClientExtension) -> Option<Self> {
        let probe = Key::new("probe").ok()?;
        client.redis_name(&probe).ok()?;
        let is_ring = client.is_redis_cluster();
        Some(Redis { client, is_ring })
    }

    async fn run(&self, script: &'static Script, key: &Key, arguments: &[&[u8]]) -> Result<Value> {
        let name = self.client.redis_name(key)?;
        let ran = if self.is_ring {
            let names = KEYS.map(|suffix| format!("{name}{suffix}"));
            let names = names.each_ref().map(String::as_str);
            self.client.script(script, &names, arguments).await
        } else {
            self.client.script(script, &[&name], arguments).await
        };
        ran.map_err(|error| error.with_key(key).into())
    }

    /// Makes a call that only reads the key of this name, so that a missing answer is not
    /// `Unknown`.
    async fn command(&self, key: &Key, command: &[&[u8]]) -> Result<Value> {
        let name = command.get(1).and_then(|name| std::str::from_utf8(name).ok());
        let sent = self.client.command(name.unwrap_or_default(), command).await;
        sent.map_err(|error| Error::Store(error.with_key(key)))
    }

    /// Runs a script that answers with the view. The first of its arguments is the birth.
    async fn viewed(
        &self,
        script: &'static Script,
        inventory: &InventoryId,
        arguments: &[&[u8]],
    ) -> Result<View> {
        let birth = inventory.birth.to_string();
        let arguments = [&[birth.as_bytes()], arguments].concat();
        let reply = self.run(script, &inventory.key, &arguments).await?;
        match is_missing(inventory, &reply) {
            Some(error) => Err(error),
            None => codec::view(&reply).ok_or_else(unreadable),
        }
    }

    async fn page(&self, inventory: &InventoryId, from: Cursor) -> Result<Page> {
        let name = self.client.redis_name(&inventory.key)?;
        let view = self.view(inventory).await?;
        // Newer records come first: holds, then by generation; then the buyers.
        let [last, before] = view.found_generations().map(|generation| match generation {
            0 => "-".to_owned(),
            _ if self.is_ring => (generation % 4).to_string(),
            _ => generation.to_string(),
        });
        let hashes = [
            format!("{name}h"),
            format!("{name}o{last}"),
            format!("{name}o{before}"),
            format!("{name}b"),
        ];
        let mut place = from.0.split(' ');
        let mut next_number = || place.next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
        let (hash, cursor) = (next_number() as usize, next_number());
        let Some(hash_name) = hashes.get(hash) else { return Ok(Page::default()) };
        let cursor = cursor.to_string();
        let command: [&[u8]; 5] =
            [b"HSCAN", hash_name.as_bytes(), cursor.as_bytes(), b"COUNT", b"1000"];
        let reply = self.command(&inventory.key, &command).await?;
        let (next, pairs): (u64, Pairs) =
            redis::from_redis_value(reply).map_err(|_| unreadable())?;
        let mut page = Page::default();
        for (id, value) in pairs.iter().filter(|(id, _)| !id.is_empty()) {
            let id = String::from_utf8_lossy(id).into();
            let value = std::str::from_utf8(value).ok();
            if hash == hashes.len() - 1 {
                page.buyers.push((id, value.and_then(|value| value.parse().ok()).unwrap_or(0)));
            } else {
                page.records.push((id, value.and_then(record_codec::read)));
            }
        }
        page.next = match (next, hash + 1 < hashes.len()) {
            (0, false) => None,
            (0, true) => Some(Cursor(format!("{} 0", hash + 1))),
            (next, _) => Some(Cursor(format!("{hash} {next}"))),
        };
        Ok(page)
    }

    async fn entries(
        &self,
        inventory: &InventoryId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<JournalEntry>> {
        self.view(inventory).await?; // another inventory of this name may exist now
        let name = format!("{}j", self.client.redis_name(&inventory.key)?);
        // Each entry of the stream is a batch, mostly of many lines.
        let (from, limit) = (format!("({after}-0"), limit.div_ceil(10).to_string());
        let command: [&[u8]; 6] =
            [b"XRANGE", name.as_bytes(), from.as_bytes(), b"+", b"COUNT", limit.as_bytes()];
        let reply = self.command(&inventory.key, &command).await?;
        let batches: Vec<(String, Vec<(String, String)>)> =
            redis::from_redis_value(reply).map_err(|_| unreadable())?;
        let mut entries = Vec::new();
        for (id, fields) in &batches {
            let lines = fields.first().map_or("", |(_, lines)| lines);
            let last = id.split('-').next().and_then(|last| last.parse::<u64>().ok());
            let last = last.ok_or_else(unreadable)?;
            let first = (last + 1).saturating_sub(lines.lines().count() as u64);
            for (line, sequence) in lines.lines().zip(first..) {
                if sequence > after {
                    entries.push(codec::entry(sequence, line).ok_or_else(unreadable)?);
                }
            }
        }
        Ok(entries)
    }

    pub(super) async fn counts_without_reclaim(
        &self,
        inventory: &InventoryId,
    ) -> Result<(View, Vec<Counts>)> {
        let birth = inventory.birth.to_string();
        let reply = self.run(&scripts().look, &inventory.key, &[birth.as_bytes()]).await?;
        match (&reply, is_missing(inventory, &reply)) {
            (_, Some(error)) => Err(error),
            (Value::Array(parts), None) => codec::counts(parts).ok_or_else(unreadable),
            _ => Err(unreadable()),
        }
    }

    /// A setting of the server; `None` if the user may not read it.
    async fn setting(&self, name: &str) -> Result<Option<String>> {
        let command: [&[u8]; 3] = [b"CONFIG", b"GET", name.as_bytes()];
        let replies = match self.client.command_everywhere(&command).await {
            Ok(replies) => replies,
            Err(error) if error.kind() == dlock::ErrorKind::Unavailable => {
                return Err(Error::Store(error));
            }
            Err(_) => return Ok(None),
        };
        let values = replies.into_iter().map(|reply| {
            let pairs: Vec<(String, String)> = redis::from_redis_value(reply).unwrap_or_default();
            pairs.into_iter().next().map(|(_, value)| value)
        });
        // Of several servers, the one that keeps least.
        let rank = |value: &Option<String>| {
            let ranks = ["yes", "always", "everysec", "no"];
            value.as_ref().map(|value| ranks.iter().position(|rank| rank == value).unwrap_or(0))
        };
        Ok(values.max_by_key(|value| rank(value).map_or(9, |rank| rank)).flatten())
    }

    async fn server_identity(&self, given: Option<&str>) -> Result<Option<String>> {
        if self.is_ring {
            return Ok(None); // the cluster says who serves what
        }
        let key = Key::new("dlock:server").map_err(Error::from)?;
        let name = format!("{}u", self.client.redis_name(&key)?);
        if let Some(given) = given {
            let command: [&[u8]; 4] = [b"SET", name.as_bytes(), given.as_bytes(), b"NX"];
            self.client.command(&name, &command).await.map_err(Error::from)?;
        }
        let reply = self.command(&key, &[b"GET", name.as_bytes()]).await?;
        redis::from_redis_value(reply).map_err(|_| unreadable())
    }
}

/// The error if a script says that the inventory is not there.
fn is_missing(inventory: &InventoryId, reply: &Value) -> Option<Error> {
    match codec::text(reply) {
        Some("N") => Some(missing(inventory, false)),
        Some("R") => Some(missing(inventory, true)),
        _ => None,
    }
}

fn unreadable() -> Error {
    Error::Unknown(None)
}

impl Store for Redis {
    fn create<'a>(&'a self, key: &'a Key, terms: &'a Terms) -> Call<'a, View> {
        Box::pin(async move {
            let comparable = terms.to_comparable();
            let numbers = terms.numbers().map(|number| number.to_string());
            let flags = if self.is_ring { codec::RING } else { 0 }
                + if terms.directory.is_empty() { 0 } else { codec::OF_SEVERAL };
            let flags = flags.to_string();
            let mut arguments = vec![comparable.as_bytes()];
            arguments.extend(numbers.iter().map(String::as_bytes));
            arguments.push(flags.as_bytes());
            let reply = self.run(&scripts().create, key, &arguments).await?;
            let Value::Array(reply) = &reply else { return Err(unreadable()) };
            let [head, made] = reply.as_slice() else { return Err(unreadable()) };
            let view = codec::view(head).ok_or_else(unreadable)?;
            let made = codec::text(made).and_then(Terms::from_comparable).ok_or_else(unreadable)?;
            terms.check(key, &made, &view)?;
            Ok(view)
        })
    }

    fn open<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        Box::pin(self.viewed(&scripts().open, inventory, &[]))
    }

    fn view<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        Box::pin(async move { self.apply_from(inventory, 0, &[]).await.map(|(view, _)| view) })
    }

    fn remove<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, bool> {
        Box::pin(async move {
            let birth = inventory.birth.to_string();
            let reply = self.run(&scripts().remove, &inventory.key, &[birth.as_bytes()]).await?;
            Ok(reply == Value::Int(1))
        })
    }

    fn apply_from<'a>(
        &'a self,
        inventory: &'a InventoryId,
        start: u32,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)> {
        Box::pin(async move {
            let batch = Batch::new(batch);
            let (birth, start) = (inventory.birth.to_string(), start.to_string());
            let packed = batch.packed();
            let arguments = [birth.as_bytes(), start.as_bytes(), packed.as_slice()];
            let reply = self.run(&scripts().apply, &inventory.key, &arguments).await?;
            if let Some(error) = is_missing(inventory, &reply) {
                return Err(error);
            }
            batch.answers(&reply).ok_or_else(unreadable)
        })
    }

    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View> {
        Box::pin(async move {
            let (what, numbers) = match change {
                Change::Window { opens_at, closes_at } => ("w", vec![opens_at, closes_at]),
                Change::Pause => ("p", vec![1]),
                Change::Resume => ("p", vec![0]),
                Change::PerBuyer(limit) => ("l", vec![limit]),
                Change::Retention(retention) => ("r", vec![retention]),
                Change::Resize(segments) => ("z", vec![segments.into()]),
                Change::Rebalance => ("b", Vec::new()),
                Change::Complete => ("y", Vec::new()),
                Change::CountFrom(changes) => ("u", vec![changes]),
                Change::Settings(to) => {
                    let (paused, limit) = (to.paused.into(), to.per_buyer);
                    let times = [to.version, to.opens_at, to.closes_at];
                    ("s", [&times[..], &[paused, limit, to.retention]].concat())
                }
            };
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            let mut arguments = vec![what.as_bytes()];
            arguments.extend(numbers.iter().map(String::as_bytes));
            self.viewed(&scripts().change, inventory, &arguments).await
        })
    }

    fn counts<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)> {
        Box::pin(async move {
            let counted = self.counts_without_reclaim(inventory).await?;
            if counted.0.next_expiry == 0 || counted.0.next_expiry > counted.0.now {
                return Ok(counted);
            }
            self.view(inventory).await?; // gives back what expired
            self.counts_without_reclaim(inventory).await
        })
    }

    fn sizes<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, Vec<u32>> {
        Box::pin(async move {
            let name = format!("{}z", self.client.redis_name(&inventory.key)?);
            let command: [&[u8]; 4] = [b"LRANGE", name.as_bytes(), b"0", b"-1"];
            let reply = self.command(&inventory.key, &command).await?;
            redis::from_redis_value(reply).map_err(|_| unreadable())
        })
    }

    fn records<'a>(&'a self, inventory: &'a InventoryId, from: Cursor) -> Call<'a, Page> {
        Box::pin(self.page(inventory, from))
    }

    fn journal<'a>(
        &'a self,
        inventory: &'a InventoryId,
        after: u64,
        limit: usize,
    ) -> Call<'a, Vec<JournalEntry>> {
        Box::pin(self.entries(inventory, after, limit))
    }

    fn directory<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, String> {
        Box::pin(async move {
            let name = format!("{}t", self.client.redis_name(&inventory.key)?);
            let reply = self.command(&inventory.key, &[b"GET", name.as_bytes()]).await?;
            let terms = codec::text(&reply).and_then(Terms::from_comparable);
            Ok(terms.map(|terms| terms.directory).unwrap_or_default())
        })
    }

    fn identity<'a>(&'a self, given: Option<&'a str>) -> Call<'a, Option<String>> {
        Box::pin(self.server_identity(given))
    }

    fn server_of<'a>(&'a self, key: &'a Key) -> Call<'a, String> {
        Box::pin(async move {
            let name = self.client.redis_name(key)?;
            self.client.redis_server_of(&name).await.map_err(Error::from)
        })
    }

    fn durability(&self) -> Call<'_, Durability> {
        Box::pin(async move {
            Ok(Durability {
                append_only: self.setting("appendonly").await?.map(|value| value == "yes"),
                fsync: self.setting("appendfsync").await?,
                eviction: self.setting("maxmemory-policy").await?,
            })
        })
    }
}
