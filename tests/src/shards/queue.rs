//! Which test a process gets next.

use std::collections::VecDeque;

/// The tests that have not begun, by module.
///
/// Tests of a module share kernels, so a process stays with a module while it can. The largest module
/// is begun first. When every module has a process, others help where most is left.
pub(crate) struct Queue {
    groups: Vec<Group>,
}

struct Group {
    tests: VecDeque<String>,
    begun: bool,
}

impl Queue {
    pub(crate) fn new(names: Vec<String>) -> Self {
        let mut groups: Vec<(String, Group)> = Vec::new();
        for name in names {
            let module = name.rsplit_once("::").map_or("", |(module, _)| module).to_string();
            match groups.iter_mut().find(|(known, _)| *known == module) {
                Some((_, group)) => group.tests.push_back(name),
                None => groups.push((module, Group { tests: [name].into(), begun: false })),
            }
        }
        Self { groups: groups.into_iter().map(|(_, group)| group).collect() }
    }

    /// Forgets the tests that have not begun.
    pub(crate) fn clear(&mut self) {
        self.groups.iter_mut().for_each(|group| group.tests.clear());
    }

    /// The next test for a process that is at `group`, which may change.
    pub(crate) fn next(&mut self, group: &mut Option<usize>) -> Option<String> {
        if let Some(test) = group.and_then(|at| self.groups[at].tests.pop_front()) {
            return Some(test);
        }
        let fullest = |begun: bool| {
            let open =
                |(_, group): &(usize, &Group)| group.begun == begun && !group.tests.is_empty();
            let groups = self.groups.iter().enumerate().filter(open);
            groups.max_by_key(|(_, group)| group.tests.len()).map(|(at, _)| at)
        };
        let at = fullest(false).or_else(|| fullest(true))?;
        let chosen = &mut self.groups[at];
        // A helper takes from the end, away from what the module's own process has compiled last.
        let test = if chosen.begun { chosen.tests.pop_back() } else { chosen.tests.pop_front() };
        chosen.begun = true;
        *group = Some(at);
        test
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue {
        let names = ["a::1", "b::c::1", "b::c::2", "b::c::3", "b::1", "a::2"];
        Queue::new(names.map(String::from).to_vec())
    }

    #[test]
    fn a_process_stays_with_a_module_and_the_largest_comes_first() {
        let (mut queue, mut group) = (queue(), None);
        let order: Vec<_> = std::iter::from_fn(|| queue.next(&mut group)).collect();
        assert_eq!(order, ["b::c::1", "b::c::2", "b::c::3", "a::1", "a::2", "b::1"]);
    }

    #[test]
    fn two_processes_take_different_modules_and_then_help() {
        let (mut queue, mut one, mut two) = (queue(), None, None);
        assert_eq!(queue.next(&mut one).unwrap(), "b::c::1");
        assert_eq!(queue.next(&mut two).unwrap(), "a::1");
        assert_eq!(queue.next(&mut two).unwrap(), "a::2");
        assert_eq!(queue.next(&mut two).unwrap(), "b::1");
        assert_eq!(queue.next(&mut two).unwrap(), "b::c::3");
        assert_eq!(queue.next(&mut one).unwrap(), "b::c::2");
        assert_eq!(queue.next(&mut one), None);
    }
}
