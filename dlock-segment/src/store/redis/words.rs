//! How batches are written for the scripts, and how their replies are read.

use redis::Value;
use rmp::encode::{write_array_len, write_str, write_uint};

use crate::store::home::cut;
use crate::store::{Answer, Ask, Counts, Effect, Entry, Fate, Id, Parts, Record, View};

/// A batch as `apply.lua` reads it. Most requests are alike, and are written
/// together: deductions of one quantity without id or buyer as a run, those with an
/// id and no buyer as a list of ids.
pub(super) struct Batch {
    packed: Vec<u8>,
    /// Where each answer is.
    places: Vec<Place>,
    runs: Vec<(u64, u64)>,
}

#[derive(Clone, Copy)]
enum Place {
    Run {
        run: usize,
        at: u64,
    },
    /// A line after those of the runs.
    Line(usize),
}

impl Batch {
    pub(super) fn new(batch: &[Ask]) -> Self {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut named: Vec<(u64, Vec<usize>)> = Vec::new();
        let mut others = Vec::new();
        let mut places = Vec::with_capacity(batch.len());
        for (index, ask) in batch.iter().enumerate() {
            places.push(Place::Line(0));
            match ask {
                Ask::Deduct { quantity, operation: None, buyer: None } => {
                    let run = runs.iter().position(|(of, _)| of == quantity);
                    let run = run.unwrap_or_else(|| {
                        runs.push((*quantity, 0));
                        runs.len() - 1
                    });
                    places[index] = Place::Run { run, at: runs[run].1 };
                    runs[run].1 += 1;
                }
                Ask::Deduct { quantity, operation: Some(_), buyer: None } => {
                    match named.iter_mut().find(|(of, _)| of == quantity) {
                        Some((_, alike)) => alike.push(index),
                        None => named.push((*quantity, vec![index])),
                    }
                }
                _ => others.push(index),
            }
        }
        let lines = named.iter().flat_map(|(_, alike)| alike).chain(&others);
        for (line, index) in lines.enumerate() {
            places[*index] = Place::Line(line);
        }
        Batch { packed: pack(batch, &runs, &named, &others), places, runs }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.packed
    }

    /// The view and the answers, in the order of the requests.
    pub(super) fn answers(&self, reply: &str) -> Option<(View, Vec<Answer>)> {
        let mut lines = reply.split('\n');
        let view = view(lines.next()?)?;
        let mut runs = Vec::with_capacity(self.runs.len());
        for _ in &self.runs {
            let mut words = lines.next()?.splitn(3, ' ');
            let done: u64 = words.next()?.parse().ok()?;
            let refusal = refusal(words.next()?);
            runs.push((done, refusal, parts(words.next()?)?));
        }
        let lines: Vec<&str> = lines.collect();
        let answer = |place: &Place| match *place {
            Place::Line(at) => item(lines.get(at)?),
            Place::Run { run, at } => {
                let (quantity, (done, refusal, parts)) = (self.runs[run].0, &runs[run]);
                if at >= *done {
                    return refusal.clone();
                }
                Some(Answer::Found(Record {
                    fate: Fate::Taken,
                    quantity,
                    refunded: 0,
                    epoch: view.epoch,
                    parts: cut(parts, at * quantity, quantity),
                    at: view.now,
                    expires: 0,
                    whose: None,
                }))
            }
        };
        let answers = self.places.iter().map(answer).collect::<Option<_>>()?;
        Some((view, answers))
    }
}

fn pack(
    batch: &[Ask],
    runs: &[(u64, u64)],
    named: &[(u64, Vec<usize>)],
    others: &[usize],
) -> Vec<u8> {
    let length = |many: usize| u32::try_from(many).unwrap_or(u32::MAX);
    let mut packed = Vec::with_capacity(32 + batch.len() * 32);
    // Writing to a Vec does not fail.
    let _ = write_array_len(&mut packed, 3);
    let _ = write_array_len(&mut packed, length(runs.len() * 2));
    for number in runs.iter().flat_map(|(quantity, count)| [*quantity, *count]) {
        let _ = write_uint(&mut packed, number);
    }
    let words = named.iter().map(|(_, alike)| alike.len() + 2).sum();
    let _ = write_array_len(&mut packed, length(words));
    for (quantity, alike) in named {
        let _ = write_uint(&mut packed, *quantity);
        let _ = write_uint(&mut packed, alike.len() as u64);
        for index in alike {
            let _ = write_str(&mut packed, fields(&batch[*index]).2.map_or("", |id| id));
        }
    }
    let _ = write_array_len(&mut packed, length(others.len() * 5));
    for index in others {
        let (kind, quantity, id, whose, extra) = fields(&batch[*index]);
        let _ = write_str(&mut packed, kind);
        let _ = write_uint(&mut packed, quantity);
        let _ = write_str(&mut packed, id.map_or("", |id| id));
        let _ = write_str(&mut packed, whose.map_or("", |id| id));
        let _ = write_uint(&mut packed, extra);
    }
    packed
}

fn fields(ask: &Ask) -> (&'static str, u64, Option<&Id>, Option<&Id>, u64) {
    match ask {
        Ask::Deduct { quantity, operation, buyer } => {
            ("d", *quantity, operation.as_ref(), buyer.as_ref(), 0)
        }
        Ask::Reserve { quantity, operation, buyer, expires_in } => {
            ("h", *quantity, Some(operation), buyer.as_ref(), *expires_in)
        }
        Ask::Confirm { operation } => ("c", 0, Some(operation), None, 0),
        Ask::Cancel { operation } => ("x", 0, Some(operation), None, 0),
        Ask::Extend { operation, until } => ("e", 0, Some(operation), None, *until),
        Ask::Refund { of, quantity, operation } => ("r", *quantity, Some(operation), Some(of), 0),
        Ask::Restock { quantity, operation } => ("s", *quantity, operation.as_ref(), None, 0),
        Ask::Resolve { operation } => ("q", 0, Some(operation), None, 0),
        Ask::Look { operation } => ("l", 0, Some(operation), None, 0),
    }
}

fn item(line: &str) -> Option<Answer> {
    match line.strip_prefix('F') {
        Some(text) => record(text).map(Answer::Found),
        None => refusal(line),
    }
}

fn refusal(letter: &str) -> Option<Answer> {
    Some(match letter {
        "A" => Answer::Absent,
        "S" => Answer::SoldOut,
        "L" => Answer::LimitReached,
        "B" => Answer::NotStarted,
        "E" => Answer::Ended,
        "P" => Answer::Paused,
        "C" => Answer::Conflict,
        "M" => Answer::BuyerMissing,
        "O" => Answer::Overflow,
        "G" => Answer::Again,
        other => Answer::TooMuch { left: other.strip_prefix('T')?.parse().ok()? },
    })
}

const FATES: [(char, Fate); 8] = [
    ('t', Fate::Taken),
    ('h', Fate::Reserved),
    ('c', Fate::Confirmed),
    ('x', Fate::Cancelled),
    ('e', Fate::Expired),
    ('r', Fate::Refund),
    ('s', Fate::Restock),
    ('q', Fate::Tombstone),
];

/// A record as it is stored.
pub(super) fn record(text: &str) -> Option<Record> {
    let mut words = text.splitn(8, ' ');
    let letter = words.next()?.chars().next()?;
    let fate = FATES.iter().find(|(known, _)| *known == letter)?.1;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (quantity, refunded, epoch) = (number()?, number()?, number()?);
    let (at, expires) = (number()?, number()?);
    let parts = parts(words.next()?)?;
    let whose = Some(words.next()?).filter(|whose| !whose.is_empty()).map(Id::from);
    let epoch = u32::try_from(epoch).ok()?;
    (refunded <= quantity).then_some(())?;
    Some(Record { fate, quantity, refunded, epoch, parts, at, expires, whose })
}

fn parts(text: &str) -> Option<Parts> {
    let part = |part: &str| {
        let (segment, quantity) = part.split_once(':')?;
        Some((segment.parse().ok()?, quantity.parse().ok()?))
    };
    text.split(',').filter(|part| !part.is_empty()).map(part).collect()
}

pub(super) fn view(line: &str) -> Option<View> {
    let mut words = line.split(' ');
    let mut next = || words.next()?.parse::<u64>().ok();
    let small = |number: Option<u64>| u32::try_from(number?).ok();
    let mut view = View { now: next()?, epoch: small(next())?, ..View::default() };
    view.segments = small(next())?;
    (view.available, view.reserved, view.sold) = (next()?, next()?, next()?);
    (view.initial, view.restocked) = (next()?, next()?);
    (view.opens_at, view.closes_at) = (next()?, next()?);
    view.paused = next()? != 0;
    (view.per_buyer, view.retention, view.journal) = (next()?, next()?, next()?);
    let _sequence = next()?;
    (view.holds, view.next_expiry) = (next()?, next()?);
    let _generations = (next()?, next()?);
    (view.birth, view.sold_by_id, view.changes) = (next()?, next()?, next()?);
    Some(view)
}

/// What `look.lua` replies.
pub(super) fn counts(reply: &[Value]) -> Option<(View, Vec<Counts>)> {
    let [head, Value::BulkString(words)] = reply else { return None };
    let view = view(text(head)?)?;
    let count = view.segments as usize;
    let word = |number: usize| {
        let bytes = words.get(number * 8..number * 8 + 8)?;
        u64::try_from(i64::from_be_bytes(bytes.try_into().ok()?)).ok()
    };
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

/// A line of the journal.
pub(super) fn entry(sequence: u64, line: &str) -> Option<Entry> {
    let words: Vec<&str> = line.split('\t').collect();
    let [letter, operation, whose, quantity, of, epoch, at] = words[..] else { return None };
    let letter = letter.chars().next()?;
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    Some(Entry {
        sequence,
        effect: Effect::ALL.iter().find(|(_, known)| *known == letter)?.0,
        operation: some(operation),
        whose: some(whose),
        quantity: quantity.parse().ok()?,
        parts: parts(of)?.to_vec(),
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
