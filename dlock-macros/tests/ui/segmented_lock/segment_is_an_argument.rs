use dlock::Result;
use dlock_segment::{Take, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64, segment: usize) -> Result<Take<u64>> {
    Ok(Take::Done(sku + segment as u64))
}

fn main() {
    let _ = take;
}
