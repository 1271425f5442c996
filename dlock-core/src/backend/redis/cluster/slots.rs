//! Pure: which node of a cluster serves which key, and what a node's refusal means.
//!
//! - A key belongs to one of 16,384 slots, by its hash tag: what is between the first `{`
//!   and the next `}`, if that is not empty.
//! - A map says which primary serves which slot. It comes from `CLUSTER SLOTS`, and each
//!   `MOVED` corrects it for one slot.
//! - `MOVED` is for good, `ASK` for one request: while a slot moves, its keys that exist
//!   are at the old node, and all others at the new one, which serves them only after
//!   `ASKING`.

use std::fmt;

use redis::{ServerError, Value};

use super::super::node_ids::NodeIds;
use crate::config::HostPort;

/// How many slots a cluster has.
pub(super) const SLOTS: usize = 16_384;

/// The slot of a key.
pub(super) fn slot_of(name: &str) -> u16 {
    let name = name.as_bytes();
    let tag = name.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &name[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then_some(&rest[..close])
    });
    crc16(tag.unwrap_or(name)) % SLOTS as u16
}

/// The checksum that clusters use: CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = table();
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        let mut crc = (n as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[n] = crc;
        n += 1;
    }
    table
}

/// A node, by its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Node {
    /// A node as clusters write it: `host:port`, with the host of the one that was asked
    /// if it is empty.
    fn parse(text: &str, asked: &Node) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        Some(Node::at(host.trim_matches(['[', ']']), port.parse().ok()?, asked))
    }

    fn at(host: &str, port: u16, asked: &Node) -> Self {
        let host = if host.is_empty() { &asked.host } else { host };
        Node { host: host.to_owned(), port }
    }
}

impl From<HostPort> for Node {
    fn from((host, port): HostPort) -> Self {
        Node { host, port }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Which primary serves which slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// For each slot the place of its primary in `primaries`, or [`NOBODY`].
    owners: Box<[u16]>,
    primaries: Vec<Node>,
    /// The ids of all nodes that it names, replicas too. By them a cluster is told from
    /// another one that was given its addresses.
    ids: NodeIds,
}

const NOBODY: u16 = u16::MAX;

impl SlotMap {
    /// A map in which nobody serves anything.
    pub(super) fn empty() -> Self {
        SlotMap { owners: vec![NOBODY; SLOTS].into(), primaries: Vec::new(), ids: NodeIds::new() }
    }

    /// The map in the answer to `CLUSTER SLOTS` of this node; `None` if it cannot be read. The
    /// places are in the order of the slots, whoever answers, so a promoted replica has the
    /// place of its primary.
    pub(super) fn read(answer: &Value, asked: &Node) -> Option<Self> {
        let Value::Array(ranges) = answer else { return None };
        let mut map = SlotMap::empty();
        let mut sorted = Vec::with_capacity(ranges.len());
        for range in ranges {
            let Value::Array(parts) = range else { return None };
            let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = parts.as_slice()
            else {
                return None;
            };
            map.ids.extend(parts[2..].iter().filter_map(id_of));
            sorted.push((first, last, primary));
        }
        sorted.sort_by_key(|(first, ..)| **first);
        for (first, last, primary) in sorted {
            let host = match primary.first()? {
                Value::BulkString(host) => std::str::from_utf8(host).ok()?,
                Value::SimpleString(host) => host,
                Value::Nil => "", // the node that was asked does not know its own
                _ => return None,
            };
            // The cluster prefers host names, and this node has none.
            let host = if host == "?" { ip_of(primary).unwrap_or_default() } else { host };
            let Value::Int(port) = primary.get(1)? else { return None };
            let owner = map.place_of(Node::at(host, u16::try_from(*port).ok()?, asked));
            let slots = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
            map.owners.get_mut(slots)?.fill(owner);
        }
        Some(map)
    }

    /// The ids of all nodes that it names.
    pub(super) fn ids(&self) -> &NodeIds {
        &self.ids
    }

    /// Whether the other map gives each slot to the same node.
    pub(super) fn agrees_with(&self, other: &SlotMap) -> bool {
        self.owners == other.owners && self.primaries == other.primaries
    }

    fn place_of(&mut self, node: Node) -> u16 {
        let found = self.primaries.iter().position(|known| *known == node);
        let place = found.unwrap_or_else(|| {
            self.primaries.push(node);
            self.primaries.len() - 1
        });
        u16::try_from(place).unwrap_or(NOBODY)
    }

    /// The place of who serves a slot, the same for all slots of one node.
    pub(super) fn place(&self, slot: u16) -> Option<usize> {
        let place = usize::from(*self.owners.get(usize::from(slot))?);
        (place < self.primaries.len()).then_some(place)
    }

    /// Who serves a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<&Node> {
        self.primaries.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    /// A node said that another one serves this slot.
    pub(super) fn correct(&mut self, slot: u16, owner: Node) {
        let place = self.place_of(owner);
        if let Some(slot) = self.owners.get_mut(usize::from(slot)) {
            *slot = place;
        }
    }

    #[cfg(test)]
    pub(super) fn forget(&mut self, slot: u16) {
        self.owners[usize::from(slot)] = NOBODY;
    }

    /// The primaries that serve any slot, sorted.
    pub(super) fn primaries(&self) -> Vec<&Node> {
        let mut serving = vec![false; self.primaries.len()];
        for owner in &self.owners {
            if let Some(serving) = serving.get_mut(usize::from(*owner)) {
                *serving = true;
            }
        }
        let nodes = self.primaries.iter().zip(serving);
        let mut nodes: Vec<_> = nodes.filter_map(|(node, serves)| serves.then_some(node)).collect();
        nodes.sort();
        nodes
    }

    /// How many slots nobody serves.
    pub(super) fn uncovered(&self) -> usize {
        self.owners.iter().filter(|owner| **owner == NOBODY).count()
    }
}

/// The address of a node that is called by its name in the answer to `CLUSTER SLOTS`.
fn ip_of(node: &[Value]) -> Option<&str> {
    fn text(value: &Value) -> Option<&str> {
        match value {
            Value::BulkString(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }
    match node.get(3)? {
        Value::Array(pairs) => {
            let mut pairs = pairs.chunks_exact(2);
            text(&pairs.find(|pair| text(&pair[0]) == Some("ip"))?[1])
        }
        Value::Map(pairs) => text(&pairs.iter().find(|(name, _)| text(name) == Some("ip"))?.1),
        _ => None,
    }
}

/// The id of a node in the answer to `CLUSTER SLOTS`.
fn id_of(node: &Value) -> Option<String> {
    let Value::Array(node) = node else { return None };
    match node.get(2)? {
        Value::BulkString(id) => String::from_utf8(id.clone()).ok(),
        Value::SimpleString(id) => Some(id.clone()),
        _ => None,
    }
}

/// What a node's refusal of one request means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirection {
    /// Another node serves the slot from now on.
    Moved { slot: u16, to: Node },
    /// Another node serves this one request, after `ASKING`.
    Ask { to: Node },
    /// Some of the keys are at another node; the same request may work soon.
    TryAgain,
    /// Nobody serves the slot at the moment.
    Down,
}

impl Redirection {
    /// What this error of that node means; `None` if it is about something else.
    pub(super) fn of(error: &ServerError, asked: &Node) -> Option<Self> {
        let mut words = error.details().unwrap_or_default().split(' ');
        match error.code() {
            "MOVED" | "ASK" => {
                let slot = words.next()?.parse().ok()?;
                let to = Node::parse(words.next()?, asked)?;
                Some(match error.code() {
                    "MOVED" => Redirection::Moved { slot, to },
                    _ => Redirection::Ask { to },
                })
            }
            "TRYAGAIN" => Some(Redirection::TryAgain),
            "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" => Some(Redirection::Down),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node { host: host.into(), port }
    }

    fn error(text: &str) -> ServerError {
        let parsed = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = parsed else { panic!("{parsed:?}") };
        error
    }

    /// The examples of the specification of clusters, and what servers answer to
    /// `CLUSTER KEYSLOT`.
    #[test]
    fn slots_are_those_of_the_servers() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12182);
        assert_eq!(slot_of("{user1000}.following"), slot_of("{user1000}.followers"));
        assert_eq!(slot_of("foo{}{bar}"), crc16(b"foo{}{bar}") % 16384);
        assert_eq!(slot_of("foo{{bar}}zap"), slot_of("{bar"));
        assert_eq!(slot_of("foo{bar}{zap}"), slot_of("bar"));
        assert_eq!(slot_of("dlock:2:{shop:a}:l"), slot_of("shop:a"));
        assert_eq!(slot_of(""), 0);
    }

    fn slots(ranges: &[(i64, i64, &str, i64)]) -> Value {
        let range = |(first, last, host, port): &(i64, i64, &str, i64)| {
            let host =
                if *host == "?" { Value::Nil } else { Value::BulkString(host.as_bytes().to_vec()) };
            let node = |port: i64, host: Value| {
                let id = Value::BulkString(format!("id{port}").into_bytes());
                Value::Array(vec![host, Value::Int(port), id, Value::Array(vec![])])
            };
            let (primary, replica) = (node(*port, host.clone()), node(*port + 100, host));
            Value::Array(vec![Value::Int(*first), Value::Int(*last), primary, replica])
        };
        Value::Array(ranges.iter().map(range).collect())
    }

    #[test]
    fn a_map_is_read_and_corrected() {
        let asked = node("asked", 1);
        let answer = slots(&[
            (0, 5460, "10.0.0.1", 7000),
            (5462, 5462, "10.0.0.1", 7000),
            (5463, 9999, "", 7001),
            (10_000, 16_383, "?", 7002),
        ]);
        let mut map = SlotMap::read(&answer, &asked).unwrap();
        assert_eq!(map.owner(0), Some(&node("10.0.0.1", 7000)));
        assert_eq!(map.owner(5461), None);
        assert_eq!(map.uncovered(), 1);
        assert_eq!(map.owner(5462), Some(&node("10.0.0.1", 7000)));
        assert_eq!(map.owner(5463), Some(&node("asked", 7001)));
        assert_eq!(map.owner(16_383), Some(&node("asked", 7002)));
        assert_eq!(map.owner(16_384), None);
        let all = [&node("10.0.0.1", 7000), &node("asked", 7001), &node("asked", 7002)];
        assert_eq!(map.primaries(), all);
        let ids = ["id7000", "id7001", "id7002", "id7100", "id7101", "id7102"];
        assert!(map.ids().iter().eq(ids), "{:?}", map.ids());
        map.correct(16_383, node("10.0.0.9", 7009));
        assert_eq!(map.owner(16_383), Some(&node("10.0.0.9", 7009)));
        assert_eq!(map.owner(16_382), Some(&node("asked", 7002)));
        for slot in 10_000..16_383 {
            map.correct(slot, node("10.0.0.9", 7009));
        }
        assert_eq!(map.primaries().len(), 3, "who serves nothing any more is not visited");
        for bad in [Value::Nil, Value::Array(vec![Value::Int(1)]), slots(&[(0, 16_384, "h", 1)])] {
            assert_eq!(SlotMap::read(&bad, &asked), None, "{bad:?}");
        }
    }

    #[test]
    fn a_node_without_the_name_that_is_preferred_is_found_by_its_address() {
        let word = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let described = |more| Value::Array(vec![word("?"), Value::Int(7000), word("id"), more]);
        let map = |more| {
            let range = vec![Value::Int(0), Value::Int(16_383), described(more)];
            SlotMap::read(&Value::Array(vec![Value::Array(range)]), &node("asked", 1)).unwrap()
        };
        let more = Value::Array(vec![word("ip"), word("10.0.0.1")]);
        assert_eq!(map(more).owner(0), Some(&node("10.0.0.1", 7000)));
        assert_eq!(map(Value::Array(vec![])).owner(0), Some(&node("asked", 7000)));
    }

    #[test]
    fn refusals_are_understood() {
        let asked = node("asked", 1);
        let says = |text: &str| Redirection::of(&error(text), &asked);
        let to = node("127.0.0.1", 6381);
        assert_eq!(
            says("MOVED 3999 127.0.0.1:6381"),
            Some(Redirection::Moved { slot: 3999, to: to.clone() })
        );
        assert_eq!(says("ASK 3999 127.0.0.1:6381"), Some(Redirection::Ask { to }));
        let to = node("asked", 6381);
        assert_eq!(says("MOVED 3999 :6381"), Some(Redirection::Moved { slot: 3999, to }));
        let to = node("::1", 6381);
        assert_eq!(says("ASK 3999 ::1:6381"), Some(Redirection::Ask { to }));
        assert_eq!(says("TRYAGAIN Multiple keys request"), Some(Redirection::TryAgain));
        assert_eq!(says("CLUSTERDOWN Hash slot not served"), Some(Redirection::Down));
        assert_eq!(says("MOVED what"), None);
        assert_eq!(says("ERR unknown"), None);
    }
}
