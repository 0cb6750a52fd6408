//! Choices that are remembered for the process.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{PoisonError, RwLock},
};

/// What was chosen for each problem met so far, up to a number of them.
pub(super) struct Memo<K, V> {
    chosen: RwLock<HashMap<K, V>>,
    most: usize,
}

impl<K: Hash + Eq, V: Copy> Memo<K, V> {
    /// Room for `most` choices.
    pub(super) fn new(most: usize) -> Self {
        Self { chosen: RwLock::new(HashMap::new()), most }
    }

    pub(super) fn get(&self, key: &K) -> Option<V> {
        // No entry is ever half written, so a writer's panic leaves a map that is good.
        self.chosen.read().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// Remembers `value`. A full memo starts over: the shapes of training are few and come back,
    /// and those of a program that fills it would not be found again anyway.
    pub(super) fn insert(&self, key: K, value: V) {
        let mut chosen = self.chosen.write().unwrap_or_else(PoisonError::into_inner);
        if chosen.len() >= self.most && !chosen.contains_key(&key) {
            chosen.clear();
        }
        chosen.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_chosen_is_found_again() {
        let memo = Memo::new(4);
        assert_eq!(memo.get(&"a"), None);
        memo.insert("a", 1);
        memo.insert("b", 2);
        memo.insert("a", 3);
        assert_eq!((memo.get(&"a"), memo.get(&"b")), (Some(3), Some(2)));
    }

    #[test]
    fn a_full_memo_starts_over_and_never_outgrows_its_bound() {
        let memo = Memo::new(8);
        for key in 0..100 {
            memo.insert(key, key);
            assert_eq!(memo.get(&key), Some(key));
            assert!(memo.chosen.read().unwrap().len() <= 8);
        }
        // One that is there already needs no room.
        let before = memo.chosen.read().unwrap().len();
        memo.insert(99, 0);
        assert_eq!(memo.chosen.read().unwrap().len(), before);
    }
}
