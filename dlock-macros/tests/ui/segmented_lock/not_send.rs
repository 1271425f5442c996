use dlock::Result;
use dlock_segment::{Take, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64) -> Result<Take<u64>> {
    let shared = std::rc::Rc::new(sku);
    std::future::ready(()).await;
    Ok(Take::Done(*shared))
}

fn main() {
    fn sent(_: impl Send) {}
    sent(take(7));
}
