//! Encodes batches for the scripts, and decodes their replies.

use hashbrown::HashSet;
use redis::Value;
use rmp::encode::{write_array_len, write_str, write_uint};

use crate::store::home::cut;
use crate::store::{
    Answer, Counts, Effect, Generations, Id, JournalEntry, Record, Request, Status, View,
    record_codec,
};

/// A batch as `apply.lua` reads it. Most requests are similar and are written together:
/// deductions of one quantity without id or buyer as a run, those with an id and no buyer
/// as a list of ids. The numbers are indices into the batch.
pub(crate) struct Batch<'a> {
    requests: &'a [Request],
    runs: Vec<(u64, Vec<usize>)>,
    named: Vec<(u64, Vec<usize>)>,
    others: Vec<usize>,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(requests: &'a [Request]) -> Self {
        let mut batch = Batch { requests, runs: Vec::new(), named: Vec::new(), others: Vec::new() };
        let mut ids = HashSet::new();
        for (place, request) in requests.iter().enumerate() {
            match request {
                Request::Deduct { quantity, operation: None, buyer: None } => {
                    alike(&mut batch.runs, *quantity, place);
                }
                Request::Deduct { quantity, operation: Some(id), buyer: None }
                    if ids.insert(id) =>
                {
                    alike(&mut batch.named, *quantity, place);
                }
                _ => batch.others.push(place),
            }
        }
        batch
    }

    /// The indices in the order in which the script applies them.
    #[cfg(test)]
    pub(crate) fn order(&self) -> Vec<usize> {
        let alike = self.runs.iter().chain(&self.named).flat_map(|(_, places)| places);
        alike.chain(&self.others).copied().collect()
    }

    pub(super) fn packed(&self) -> Vec<u8> {
        let length = |many: usize| u32::try_from(many).unwrap_or(u32::MAX);
        let mut packed = Vec::with_capacity(32 + self.requests.len() * 32);
        // Writing to a Vec does not fail.
        let _ = write_array_len(&mut packed, 3);
        let _ = write_array_len(&mut packed, length(self.runs.len() * 2));
        for (quantity, places) in &self.runs {
            let _ = write_uint(&mut packed, *quantity);
            let _ = write_uint(&mut packed, places.len() as u64);
        }
        let _ = write_array_len(&mut packed, length(self.named.len() * 2));
        for (quantity, places) in &self.named {
            let _ = write_uint(&mut packed, *quantity);
            let _ = write_array_len(&mut packed, length(places.len()));
            for place in places {
                let _ =
                    write_str(&mut packed, fields(&self.requests[*place]).2.map_or("", |id| id));
            }
        }
        let others = self.others.iter().map(|place| &self.requests[*place]);
        // When a request was placed stands before it.
        let items = others.flat_map(|request| {
            let placed = match request {
                Request::Placed { at, .. } => Some(("a", *at, None, None, Extra::Number(0))),
                _ => None,
            };
            placed.into_iter().chain([fields(request.what())])
        });
        let items: Vec<Fields<'_>> = items.collect();
        let _ = write_array_len(&mut packed, length(items.len() * 5));
        for (kind, quantity, id, whose, extra) in items {
            let _ = write_str(&mut packed, kind);
            let _ = write_uint(&mut packed, quantity);
            let _ = write_str(&mut packed, id.map_or("", |id| id));
            let _ = write_str(&mut packed, whose.map_or("", |id| id));
            let _ = match extra {
                Extra::Number(number) => write_uint(&mut packed, number).map(drop),
                Extra::Record(receipt) => {
                    write_str(&mut packed, &receipt.map(record_codec::write).unwrap_or_default())
                }
                Extra::Pair(home, number) => write_str(&mut packed, &format!("{home} {number}")),
            };
        }
        packed
    }

    /// Decodes the view and the answers, in the order of the requests.
    pub(super) fn answers(&self, reply: &Value) -> Option<(View, Vec<Answer>)> {
        let Value::Array(reply) = reply else { return None };
        let [head, lines] = reply.as_slice() else { return None };
        let view = view(head)?;
        let mut lines = text(lines)?.split('\n');
        let mut answers = vec![Answer::Absent; self.requests.len()];
        for (quantity, places) in &self.runs {
            let mut words = lines.next()?.splitn(3, ' ');
            let done: u64 = words.next()?.parse().ok()?;
            let refusal = refusal(words.next()?);
            let parts = record_codec::read_parts(words.next()?)?;
            for (place, at) in places.iter().zip(0..) {
                answers[*place] = if at < done {
                    Answer::Found(Record {
                        status: Status::Taken,
                        quantity: *quantity,
                        refunded: 0,
                        epoch: view.epoch,
                        parts: cut(&parts, at * quantity, *quantity),
                        at: view.now,
                        expires: 0,
                        whose: None,
                    })
                } else {
                    refusal.clone()?
                };
            }
        }
        for (_, places) in &self.named {
            let mut places = places.iter();
            for alike in lines.next()?.split('\t') {
                let (count, text) = alike.split_once(' ')?;
                let found = answer(text)?;
                for place in places.by_ref().take(count.parse().ok()?) {
                    answers[*place] = found.clone();
                }
            }
            places.next().is_none().then_some(())?;
        }
        for place in &self.others {
            answers[*place] = answer(lines.next()?)?;
        }
        Some((view, answers))
    }
}

fn alike(lists: &mut Vec<(u64, Vec<usize>)>, quantity: u64, place: usize) {
    match lists.iter_mut().find(|(of, _)| *of == quantity) {
        Some((_, places)) => places.push(place),
        None => lists.push((quantity, vec![place])),
    }
}

/// What some kinds of requests have besides.
enum Extra<'a> {
    Number(u64),
    Record(Option<&'a Record>),
    Pair(u32, u64),
}

type Fields<'a> = (&'static str, u64, Option<&'a Id>, Option<&'a Id>, Extra<'a>);

fn fields(request: &Request) -> Fields<'_> {
    let none = Extra::Number(0);
    match request {
        Request::Deduct { quantity, operation, buyer } => {
            ("d", *quantity, operation.as_ref(), buyer.as_ref(), none)
        }
        Request::Reserve { quantity, operation, buyer, expires_in } => {
            ("h", *quantity, Some(operation), buyer.as_ref(), Extra::Number(*expires_in))
        }
        Request::Confirm { operation } => ("c", 0, Some(operation), None, none),
        Request::ConfirmPart { operation, quantity } => {
            ("p", *quantity, Some(operation), None, none)
        }
        Request::Cancel { operation } => ("x", 0, Some(operation), None, none),
        Request::Extend { operation, until } => {
            ("e", 0, Some(operation), None, Extra::Number(*until))
        }
        Request::Refund { of, quantity, operation, damaged, receipt } => {
            let kind = if *damaged { "g" } else { "r" };
            (kind, *quantity, Some(operation), Some(of), Extra::Record(receipt.as_deref()))
        }
        Request::Restock { quantity, operation } => {
            ("s", *quantity, operation.as_ref(), None, none)
        }
        Request::WriteOff { quantity, operation } => ("w", *quantity, Some(operation), None, none),
        Request::Resolve { operation } => ("q", 0, Some(operation), None, none),
        Request::Look { operation } => ("l", 0, Some(operation), None, none),
        Request::Import { quantity, operation, buyer, or_debt } => {
            ("n", *quantity, Some(operation), buyer.as_ref(), Extra::Number(u64::from(*or_debt)))
        }
        Request::Placed { request, .. } => fields(request),
        Request::Send { to, quantity, after } => {
            ("o", *quantity, None, None, Extra::Pair(*to, *after))
        }
        Request::Receive { from, total, seen } => {
            ("i", *total, None, None, Extra::Pair(*from, *seen))
        }
    }
}

/// Decodes a record, which starts with a lowercase letter, or a refusal.
fn answer(text: &str) -> Option<Answer> {
    match text.starts_with(|letter: char| letter.is_ascii_lowercase()) {
        true => Some(record_codec::read(text).map_or(Answer::Unreadable, Answer::Found)),
        false => refusal(text),
    }
}

fn refusal(letter: &str) -> Option<Answer> {
    Some(match letter {
        "A" => Answer::Absent,
        "L" => Answer::LimitReached,
        "B" => Answer::NotStarted,
        "E" => Answer::Ended,
        "P" => Answer::Paused,
        "C" => Answer::Conflict,
        "M" => Answer::BuyerMissing,
        "F" => Answer::Full,
        "N" => Answer::NotSold,
        "Y" => Answer::TooOld,
        "O" => Answer::Overflow,
        "G" => Answer::Again,
        "U" => Answer::Unreadable,
        other if other.starts_with('V') => {
            let (total, seen) = other[1..].split_once(' ')?;
            Answer::Moved { total: total.parse().ok()?, seen: seen.parse().ok()? }
        }
        other => {
            let number = other.get(1..)?.parse().ok()?;
            match other.as_bytes()[0] {
                b'S' => Answer::SoldOut { available: number },
                b'T' => Answer::TooMuch { left: number },
                _ => return None,
            }
        }
    })
}

/// The number of 64-bit words of a head; the last one is the time.
const WORDS: usize = 32;

/// The flags of the layout, as in `layout.lua`.
pub(super) const RING: u64 = 256;
pub(super) const OF_SEVERAL: u64 = 512;
const COMPLETE: u64 = 1_024;

/// Decodes a head as `head.lua` packs it.
pub(super) fn view(head: &Value) -> Option<View> {
    let Value::BulkString(packed) = head else { return None };
    let word = |at| word(packed, at);
    let small = |at| u32::try_from(word(at)?).ok();
    let now = word(WORDS - 1)?;
    let numbering = Generations { since: word(24)?, number: word(25)?, retention: word(12)? };
    let generations = [word(17)?, word(18)?];
    Some(View {
        now,
        epoch: small(1)?,
        segments: small(2)?,
        available: word(3)?,
        reserved: word(4)?,
        sold: word(5)?,
        initial: word(6)?,
        restocked: word(7)?,
        written_off: word(23)?,
        opens_at: word(8)?,
        closes_at: word(9)?,
        paused: word(10)? != 0,
        per_buyer: word(11)?,
        numbering,
        journal: word(13)?,
        holds: word(15)?,
        next_expiry: word(16)?,
        generations,
        // A generation that is not written to yet has none.
        tombstones: if numbering.at(now) > generations[0] { 0 } else { word(22)? },
        birth: word(19)?,
        sold_by_id: word(20)?,
        changes: word(21)?,
        sent: word(26)?,
        received: word(27)?,
        inflow: word(28)?,
        leased: word(29)?,
        version: word(30)?,
        is_one_of_several: word(0)? & OF_SEVERAL != 0,
        is_complete: word(0)? & COMPLETE != 0,
    })
}

fn word(packed: &[u8], at: usize) -> Option<u64> {
    let bytes = packed.get(at * 8..at * 8 + 8)?;
    u64::try_from(i64::from_be_bytes(bytes.try_into().ok()?)).ok()
}

/// Decodes the reply of `look.lua`.
pub(super) fn counts(reply: &[Value]) -> Option<(View, Vec<Counts>)> {
    let [head, Value::BulkString(words)] = reply else { return None };
    let view = view(head)?;
    let count = view.segments as usize;
    let word = |at| word(words, at);
    let segment = |at: usize| {
        Some(Counts {
            available: word(at)?,
            reserved: word(count + at)?,
            sold: word(2 * count + at)?,
            supplied: word(3 * count + at)?,
        })
    };
    Some((view, (0..count).map(segment).collect::<Option<_>>()?))
}

/// Decodes a line of the journal.
pub(super) fn entry(sequence: u64, line: &str) -> Option<JournalEntry> {
    let words: Vec<&str> = line.split('\t').collect();
    let [letter, operation, whose, quantity, of, epoch, at] = words[..] else { return None };
    let letter = letter.chars().next()?;
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    Some(JournalEntry {
        home: 0,
        sequence,
        effect: Effect::ALL.iter().find(|(_, known)| *known == letter)?.0,
        operation: some(operation),
        whose: some(whose),
        quantity: quantity.parse().ok()?,
        parts: record_codec::read_parts(of)?.to_vec(),
        epoch: epoch.parse().ok()?,
        at: at.parse().ok()?,
    })
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
