//! How keys, holders and waiters are written; the other half is `lua/state.lua`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::{HolderState, WaiterState, notice_message};
use crate::claim::{Claim, Holder, Mode, Notice, Owner};
use crate::key::Key;

/// The layout of what is stored. `layout_marker.rs` keeps programs of two layouts apart.
pub(super) const LAYOUT: &str = "2";
/// What every key starts with: the layout is a part of it.
const START: &str = "dlock:2:";

/// The names of the keys of one namespace.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// What all of them start with.
    start: Arc<str>,
}

impl Names {
    pub(super) fn new(namespace: &str) -> Self {
        Names { start: format!("{START}{{{namespace}:").into() }
    }

    /// The state of a key as a lock, or as a semaphore.
    pub(super) fn state(&self, key: &Key, permits: bool) -> String {
        let mut name = String::new();
        self.write_state(key, permits, &mut name);
        name
    }

    pub(super) fn write_state(&self, key: &Key, permits: bool, into: &mut String) {
        into.push_str(&self.start);
        escape(key.as_str(), into);
        into.push_str(if permits { "}:p" } else { "}:l" });
    }

    /// The state of a key at a node of a quorum.
    pub(super) fn quorum(&self, key: &Key) -> String {
        let mut name = String::new();
        self.write_quorum(key, &mut name);
        name
    }

    pub(super) fn write_quorum(&self, key: &Key, into: &mut String) {
        into.push_str(&self.start);
        escape(key.as_str(), into);
        into.push_str("}:q");
    }

    /// Since when a node of a quorum remembers.
    pub(super) fn marker(&self) -> String {
        format!("{}}}:v", self.start.trim_end_matches(':'))
    }

    /// Where it is remembered who broke a key.
    pub(super) fn broken(&self, key: &Key) -> String {
        let mut name = self.state(key, false);
        name.pop();
        name.push('b');
        name
    }

    /// A pattern for `SCAN`: the keys that start so.
    pub(super) fn pattern(&self, prefix: &str) -> String {
        let mut escaped = String::with_capacity(prefix.len());
        escape(prefix, &mut escaped);
        let mut pattern = String::from(&*self.start);
        for c in escaped.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '^' | '\\') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern.push_str("*}:[lp]");
        pattern
    }

    /// The key whose state is kept under this name.
    pub(super) fn key_of(&self, name: &str) -> Option<Key> {
        let rest = name.strip_prefix(&*self.start)?;
        let text = ["}:l", "}:p", "}:q"].iter().find_map(|end| rest.strip_suffix(end))?;
        Key::new(unescape(text)).ok()
    }

    /// What a notice says.
    pub(super) fn notice(&self, message: &str) -> Option<(Key, Owner, Notice)> {
        notice_message::read(message, |name| self.key_of(name))
    }
}

/// The channel of the client with this random number.
pub(super) fn channel(client: u128) -> String {
    format!("{START}n:{client:032x}")
}

/// Braces would end the hash tag, and a text must not be another's escaped form.
fn escape(text: &str, into: &mut String) {
    let mut rest = text;
    while let Some(place) = rest.find(['%', '{', '}']) {
        into.push_str(&rest[..place]);
        into.push_str(match rest.as_bytes()[place] {
            b'%' => "%25",
            b'{' => "%7B",
            _ => "%7D",
        });
        rest = &rest[place + 1..];
    }
    into.push_str(rest);
}

fn unescape(text: &str) -> String {
    text.replace("%7B", "{").replace("%7D", "}").replace("%25", "%")
}

/// The owner and the terms of a lease.
pub(super) fn write_head(claim: &Claim, into: &mut String) {
    write_mark(claim.owner, into);
    match claim.mode {
        Mode::Exclusive => into.push_str("\tx\t0\t0"),
        Mode::Shared => into.push_str("\ts\t0\t0"),
        Mode::Permits { count, of } => {
            let _ = write!(into, "\tp\t{count}\t{of}"); // a String takes everything
        }
    }
}

/// The start of that: what tells the lease of an owner.
pub(super) fn write_mark(owner: Owner, into: &mut String) {
    into.push('1');
    write_owner(owner, into);
}

/// The 32 digits of an owner.
pub(super) fn write_owner(owner: Owner, into: &mut String) {
    let bits = owner.bits();
    for place in (0..128).step_by(4).rev() {
        into.push(char::from(b"0123456789abcdef"[(bits >> place) as usize & 0xf]));
    }
}

/// The end of a record: the channel of the holder's client, and who the holder is.
pub(super) fn tail(channel: &str, holder: &Holder) -> String {
    format!("\t{channel}\t{}", info(holder))
}

/// Whether a claim is to queue, for how long, and when it was sent.
pub(super) fn write_asking(claim: &Claim, into: &mut String) {
    let (queue, queue_ttl) = (u8::from(claim.queue), micros(claim.queue_ttl()));
    let _ = write!(into, "{queue}\t{queue_ttl}\t{}", claim.sent.as_nanos());
}

/// A mode as the scripts know it: letter, permits to take, permits in all.
fn mode_of(letter: &str, take: &str, of: &str) -> Option<Mode> {
    Some(match letter {
        "x" => Mode::Exclusive,
        "s" => Mode::Shared,
        "p" => Mode::Permits { count: take.parse().ok()?, of: of.parse().ok()? },
        _ => return None,
    })
}

/// A duration in whole microseconds, rounded up: the server must never end a
/// lease before the client does.
pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}

/// The same in milliseconds.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A holder as JSON, without control characters.
#[derive(Serialize, Deserialize)]
struct Info<'a> {
    #[serde(borrow)]
    name: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    host: std::borrow::Cow<'a, str>,
    pid: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<(String, String)>,
}

pub(super) fn info(holder: &Holder) -> String {
    let Holder { name, host, pid, tags, .. } = holder;
    let info = Info { name: name.into(), host: host.into(), pid: *pid, tags: tags.clone() };
    serde_json::to_string(&info).unwrap_or_else(|_| "{}".to_owned())
}

/// Who that is; the number of the client means nothing outside its process.
pub(super) fn holder(json: &str) -> Option<Arc<Holder>> {
    let Info { name, host, pid, tags } = serde_json::from_str(json).ok()?;
    let (name, host) = (name.into_owned(), host.into_owned());
    Some(Arc::new(Holder { client: 0, name, host, pid, tags }))
}

/// The holders in the answer of `inspect`, the longest first.
pub(super) fn holder_states(now: u64, records: &[String]) -> Vec<HolderState> {
    let mut holders: Vec<_> = records.iter().filter_map(|it| holder_state(now, it)).collect();
    holders.sort_by_key(|it| (it.mode.is_permits(), it.token, std::cmp::Reverse(it.held_for)));
    holders
}

fn holder_state(now: u64, record: &str) -> Option<HolderState> {
    let fields: Vec<&str> = record.splitn(10, '\t').collect();
    let [expires, parked, letter, count, of, first, _, since, _, json] = fields[..] else {
        return None;
    };
    let mode = mode_of(letter, count, of)?;
    Some(HolderState {
        holder: holder(json)?,
        mode,
        token: if mode.is_permits() { None } else { Some(first.parse().ok()?) },
        held_for: Duration::from_micros(now.saturating_sub(since.parse().ok()?)),
        expires_in: Duration::from_micros(expires.parse::<u64>().ok()?.saturating_sub(now)),
        is_over: parked != "0",
    })
}

/// The waiters in the answer of `inspect`, in the order of their places.
pub(super) fn waiter_states(now: u64, records: &[String]) -> Vec<WaiterState> {
    let mut waiters: Vec<_> = records.iter().filter_map(|it| waiter_state(now, it)).collect();
    waiters.sort_by_key(|(place, it)| (it.mode.is_permits(), *place));
    waiters.into_iter().map(|(_, waiter)| waiter).collect()
}

fn waiter_state(now: u64, record: &str) -> Option<(u64, WaiterState)> {
    let fields: Vec<&str> = record.splitn(11, '\t').collect();
    let [_, _, place, since, _, _, letter, count, of, _, json] = fields[..] else { return None };
    let waiter = WaiterState {
        holder: holder(json)?,
        mode: mode_of(letter, count, of)?,
        waiting_for: Duration::from_micros(now.saturating_sub(since.parse().ok()?)),
    };
    Some((place.parse().ok()?, waiter))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever arrives on a channel or is found in a record is read or refused.
    #[test]
    fn any_text_is_read() {
        use rand::{RngExt as _, SeedableRng as _};
        let names = Names::new("shop");
        let pieces = [
            "g",
            "t",
            "b",
            "\t",
            " ",
            "0",
            "9223372036854775807",
            "-1",
            "{shop:a}",
            "dlock:2:",
            ":l",
            "0123456789abcdef0123456789abcdef",
            "{\"h\":1}",
            "null",
            "\u{1f512}",
            "%2",
            "%zz",
            "x",
        ];
        for seed in 0..20_000 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let count = rng.random_range(0..9);
            let text: String =
                (0..count).map(|_| pieces[rng.random_range(0..pieces.len())]).collect();
            let _ = (names.notice(&text), names.key_of(&text), holder(&text));
            let records = [text.clone(), text];
            let now = rng.random::<u64>() >> rng.random_range(0..64);
            let _ = (holder_states(now, &records), waiter_states(now, &records));
        }
    }
    use crate::claim::{Grant, LossReason};
    use crate::clock::Moment;

    #[test]
    fn names_lead_back_to_their_keys() {
        let names = Names::new("shop");
        for text in ["a", "order:7", "a{b}c", "a%7Bb%7D", "%", "%25", "}:l", "näme 🎉", "*?[x]\\"]
        {
            let key = Key::new(text).unwrap();
            for permits in [false, true] {
                let name = names.state(&key, permits);
                assert_eq!(names.key_of(&name).unwrap(), key, "{name}");
                assert_eq!(name.matches('}').count(), 1, "one hash tag: {name}");
            }
        }
        assert_eq!(names.state(&Key::new("a").unwrap(), false), "dlock:2:{shop:a}:l");
        assert!(Names::new("sho").key_of("dlock:2:{shop:a}:l").is_none());
    }

    #[test]
    fn names_begin_with_the_layout() {
        assert_eq!(START, format!("dlock:{LAYOUT}:"));
    }

    #[test]
    fn marks_are_owners() {
        for bits in [0, 7, u128::MAX, 0x0123_4567_89ab_cdef_0011_2233_4455_6677] {
            let owner = Owner::from_bits(bits);
            let mut mark = String::new();
            write_mark(owner, &mut mark);
            assert_eq!(mark, format!("1{owner}"));
        }
    }

    #[test]
    fn notices_are_read() {
        let names = Names::new("shop");
        let owner = Owner::from_bits(7);
        let text = format!("g\t{owner}\tdlock:2:{{shop:a}}:l\t41\t3\t18446744073709551615");
        let (key, whose, notice) = names.notice(&text).unwrap();
        assert_eq!((key.as_str(), whose), ("a", owner));
        let grant = Grant { first: 41, count: 3 };
        assert_eq!(notice, Notice::Granted { grant, sent: Moment::NEVER });
        let text = format!("b\t{owner}\tdlock:2:{{shop:a}}:p\tan operator\twith a tab");
        let (_, _, notice) = names.notice(&text).unwrap();
        let by = "an operator\twith a tab".to_owned();
        assert_eq!(notice, Notice::Lost(LossReason::Broken { by }));
        assert!(names.notice("g\tx").is_none());
    }
}
